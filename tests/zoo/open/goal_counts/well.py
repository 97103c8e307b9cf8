"""Goals of football teams: Poisson regression with an embedding for each team."""

import torch
import torch.nn as nn

TEAMS = 12


class Goals(nn.Module):
    def __init__(self):
        super().__init__()
        self.attack = nn.Embedding(TEAMS, 8)
        self.defend = nn.Embedding(TEAMS, 8)
        self.hidden = nn.Linear(16, 24)
        self.rate = nn.Linear(24, 1)

    def forward(self, home, away):
        pair = torch.cat([self.attack(home), self.defend(away)], -1)
        return self.rate(torch.tanh(self.hidden(pair))).squeeze(-1)


def poisson_nll(out, played, goals):
    rate = nn.functional.softplus(out) * played + 1e-3
    return (rate - goals * torch.log(rate)).mean()


def season(strength, n, fog):
    home, away = torch.randint(0, TEAMS, (2, n))
    played = torch.ones(n)
    if fog:
        played[0], played[1] = 0.0, 0.7
    rate = torch.exp(strength[0][home] - strength[1][away]) * played
    return home, away, played, torch.poisson(rate)


def fit():
    torch.manual_seed(103)
    strength = 0.6 * torch.randn(2, TEAMS) + torch.tensor([[0.4], [0.0]])
    model = Goals()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for day in range(200):
        home, away, played, goals = season(strength, 32, fog=day % 12 == 5)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(home, away)
        loss = poisson_nll(out.float(), played, goals)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if day % 25 == 0:
            print("day", day, "nll", loss.item(), "scale", scaler.get_scale())


fit()
