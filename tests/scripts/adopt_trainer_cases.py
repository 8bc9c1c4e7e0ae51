"""Cases of adopting and exporting checkpoints of trainers: Lightning, Hugging Face; in one process.

Each case runs in a folder of its own; what came of it is written as JSON.

    python adopt_trainer_cases.py FOLDER [CASE]...
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from tests.scripts.adopted_nets import Net, X, same
from tests.scripts.adopting import command, run_all

import holdfast

# -- Lightning ----------------------------------------------------------------------------


def case_lightning(here):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width=4, seed=0):
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(width, seed)

        def training_step(self, batch, _):
            return self.net(batch)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        here / "ck", every_n_train_steps=4, filename="last", enable_version_counter=False
    )

    def fitted(steps, **given):
        trainer = lightning.Trainer(
            max_steps=steps,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[saving],
            default_root_dir=here,
        )
        data = torch.utils.data.DataLoader(X, batch_size=4)
        module = Module(seed=1)
        trainer.fit(module, data, **given)
        return trainer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fitted(4)
    told = command("adopt", here / "run", "--from", here / "ck")
    assert "step 4 (by global_step)" in told, told
    assert "(Lightning)" in told, told
    assert "in the middle of epoch 1: the data begins at the top of it" in told, told
    assert "Left out: loops, callbacks" in told, told
    # With a loop of one's own: the whole module, or what is in it.
    module = Module(seed=7)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = {"model": module, "optimizer": optimizer, "scheduler": scheduler}
    with holdfast.Run(here / "run", **state) as run:
        assert run.step == 4
        same(module.state_dict(), trainer.lightning_module.state_dict())
        same(optimizer.state_dict(), trainer.optimizers[0].state_dict())
        assert scheduler.last_epoch == 4
        assert next(iter(run.epochs(9))) == 1
    names = ("--name", "model=state_dict.net", "--epoch", 2)
    command("adopt", here / "net", "--from", here / "ck" / "last.ckpt", *names)
    net = Net(seed=7)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with holdfast.Run(here / "net", model=net, optimizer=optimizer) as run:
        same(net, trainer.lightning_module.net)
        same(optimizer.state_dict(), trainer.optimizers[0].state_dict())
        assert next(iter(run.epochs(9))) == 2


# -- Hugging Face -----------------------------------------------------------------------


def case_hugging_face_there_and_back(here):
    import transformers

    def built(seed):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            **{"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8},
            **{"bos_token_id": 0, "eos_token_id": 0},
        )
        return transformers.GPT2LMHeadModel(config)

    words = torch.randint(16, (16, 8))
    data = [{"input_ids": line, "labels": line} for line in words]

    def trainer(model, folder, steps):
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=steps,
            save_steps=3,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return transformers.Trainer(model, arguments, train_dataset=data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.set_verbosity_error()
        first = trainer(built(0), here / "hf", 6)
        first.train()
    told = command("adopt", here / "run", "--from", here / "hf")
    assert "step 6 (by trainer_state.json), adopted from" in told, told
    assert "checkpoint-6 (Hugging Face)" in told, told
    assert "in the middle of epoch 1" in told, told
    mine = built(3)
    plain = trainer(mine, here / "none", 6)
    plain.create_optimizer_and_scheduler(6)
    state = {"model": mine, "optimizer": plain.optimizer, "scheduler": plain.lr_scheduler}
    wanted = torch.load(here / "hf" / "checkpoint-6" / "rng_state.pth", weights_only=False)
    with holdfast.Run(here / "run", **state) as run:
        assert run.step == 6
        same(mine, first.model)
        same(plain.optimizer.state_dict(), first.optimizer.state_dict())
        assert mine.lm_head.weight is mine.transformer.wte.weight
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        for _ in run.steps(7):
            assert random.getstate() == wanted["python"]
            assert np.array_equal(np.random.get_state()[1], wanted["numpy"][1])
            assert torch.equal(torch.get_rng_state(), wanted["cpu"])
    config = here / "hf" / "checkpoint-6"
    words = ("export", here / "run", here / "out", "--to", "huggingface")
    told = command(*words, "--config", here / "nowhere", status=2)
    assert "there is no config.json" in told, told
    command(*words, "--config", config)
    assert {each.name for each in (here / "out").iterdir()} == {
        *("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"),
        *("config.json", "generation_config.json"),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = transformers.GPT2LMHeadModel.from_pretrained(here / "out")
        same(loaded, first.model)
        # And its own Trainer goes on from there.
        second = trainer(built(5), here / "more", 8)
        second.train(resume_from_checkpoint=str(here / "out"))
    assert second.state.global_step == 8
    steps = {int(each["step"]) for each in second.optimizer.state.values()}
    assert steps == {7}


NEEDS = {"case_lightning": "lightning", "case_hugging_face_there_and_back": "transformers"}


if __name__ == "__main__":
    found = [name for name in NEEDS if importlib.util.find_spec(NEEDS[name])]
    run_all(Path(sys.argv[1]), {name: globals()[name] for name in sys.argv[2:] or found})
