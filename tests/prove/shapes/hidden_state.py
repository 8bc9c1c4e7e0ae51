"""As word_language_model: the hidden state goes from batch to batch, and the run does not know it.

The update is made by hand, so there is no optimizer to see.
"""

import torch
from torch import nn

import holdfast

torch.set_num_threads(1)
torch.manual_seed(1111)
corpus = torch.randint(0, 12, (61, 4))
BPTT = 5


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(12, 6), nn.LSTM(6, 6), nn.Linear(6, 12)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def repackage_hidden(hidden):
    return tuple(part.detach() for part in hidden)


def train(run, model):
    hidden = (torch.zeros(1, 4, 6), torch.zeros(1, 4, 6))
    for i in run.batches(range(0, 60, BPTT)):
        data, targets = corpus[i : i + BPTT], corpus[i + 1 : i + 1 + BPTT].flatten()
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        nn.functional.cross_entropy(output, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.5)


model = RNNModel()
with holdfast.Run("runs/words", model=model) as run:
    for _ in run.epochs(4):
        train(run, model)
