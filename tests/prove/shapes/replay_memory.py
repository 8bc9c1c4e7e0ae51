"""As deep Q-learning: the memory of transitions that batches are drawn from is not saved."""

import os
import random
from collections import deque
from pathlib import Path

import torch
from torch import nn

EPISODES = 12
torch.set_num_threads(1)
torch.manual_seed(3)
random.seed(3)
policy = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *transition):
        self.memory.append(transition)

    def sample(self, count):
        return random.sample(self.memory, count)


memory = ReplayMemory(100)
steps_done = first = 0
if Path("agent.pt").exists():
    saved = torch.load("agent.pt", weights_only=False)
    policy.load_state_dict(saved["policy"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    first, steps_done = saved["episode"], saved["steps_done"]
for episode in range(first, EPISODES):
    state = torch.randn(4)
    for _ in range(8):
        with torch.no_grad():
            action = int(policy(state).argmax()) if random.random() > 0.3 else random.randrange(2)
        following = state.roll(action + 1) + 0.1 * torch.randn(4)
        memory.push(state, action, following.sum())
        state = following
        steps_done += 1
        if len(memory.memory) < 4:
            continue
        states, actions, rewards = zip(*memory.sample(4), strict=True)
        values = policy(torch.stack(states)).gather(1, torch.tensor(actions)[:, None])
        loss = nn.functional.smooth_l1_loss(values.squeeze(1), torch.stack(rewards))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    kept = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
    kept |= {"torch": torch.get_rng_state(), "python": random.getstate()}
    torch.save({**kept, "episode": episode + 1, "steps_done": steps_done}, "agent.tmp")
    os.replace("agent.tmp", "agent.pt")
