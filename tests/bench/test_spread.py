"""What several ranks cannot run is refused before anything starts."""

from __future__ import annotations

import pytest

from moetta.bench import Cell, spread
from moetta.core.inputs import Inputs
from moetta.core.norm_affine import NormAffineAdapter, SGDConfig
from moetta.core.objective import Step

CELL = Cell("tent", "classical", "digits-vit")


class Own(NormAffineAdapter[SGDConfig]):
    """A method from outside that steps in its own way."""

    def learn(self, inputs: Inputs) -> Step:
        return Step(inputs.logits(self.model))


@pytest.fixture(autouse=True)
def _under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def test_torchrun_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread.launched() == 4
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # a scheduler may set WORLD_SIZE alone
    assert spread.launched() == 1


def test_one_cell_is_accepted() -> None:
    assert spread.check([CELL, CELL], 1) is CELL


@pytest.mark.parametrize(
    ("cells", "workers", "message"),
    [
        ([CELL, Cell("sar", "classical", "digits-vit")], 1, "4 ranks for 2 runs.*--workers 4"),
        ([CELL], 2, "--workers 2 computes several runs at once"),
        ([Cell("tent", "classical", "digits-vit", device="cuda:1")], 1, "--device cuda, not cuda"),
        ([Cell("tent", "classical", "digits-vit", device="mps")], 1, "cpu or cuda, not mps"),
    ],
)
def test_others_are_refused(cells: list[Cell], workers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spread.check(cells, workers)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 ranks here, but torch sees 2 CUDA devices"):
        spread.check([Cell("tent", "classical", "digits-vit", device="cuda")], 1)


def test_a_method_that_steps_alone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    method = spread.find("tent")

    class Registered:
        adapter = Own

    monkeypatch.setattr(spread, "find", lambda _: Registered)
    with pytest.raises(
        ValueError, match=r"tent cannot run on several ranks: Own defines learn\(\)"
    ):
        spread.check([CELL], 1)
    assert method.adapter.steps_alone() is None
