"""The catalogue is complete, uniform, and its examples do what they say."""

import gc
import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import gradscale
import gradscale.torch
from gradscale.core.records import Verdict
from gradscale.diagnosis import diagnose_run
from gradscale.judge.catalogue import BY_CODE, CATALOGUE, SECTIONS
from gradscale.runfile import open_run

SOURCE = Path(gradscale.__file__).parent
# The only example that a CPU cannot show: there a tensor is read and refused (GS101).
NEEDS_ACCELERATOR = {"GS109"}

each_entry = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.code)


def codes_in_source() -> set[str]:
    return {
        code
        for path in SOURCE.rglob("*.py")
        for code in re.findall(r"\bGS\d{3}\b", path.read_text(encoding="utf-8"))
    }


def test_the_catalogue_has_exactly_the_codes_that_the_source_uses():
    assert set(BY_CODE) == codes_in_source()


def test_codes_come_in_order_and_only_once():
    codes = [entry.code for entry in CATALOGUE]
    assert codes == sorted(set(codes))


def test_names_are_unique():
    names = [entry.name for entry in CATALOGUE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("verdict", Verdict, ids=str)
def test_every_verdict_has_an_entry(verdict):
    assert verdict.code in BY_CODE


@each_entry
def test_a_code_belongs_to_a_section(entry):
    assert entry.section == SECTIONS[entry.code[:3]]


@each_entry
def test_a_name_is_in_kebab_case(entry):
    assert re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", entry.name)


@each_entry
def test_a_summary_is_one_short_line_without_a_full_stop(entry):
    assert 0 < len(entry.summary) <= 76
    assert not entry.summary.endswith(".")
    assert "\n" not in entry.summary


@each_entry
def test_texts_are_full_sentences_without_stray_spaces(entry):
    texts = [entry.meaning, entry.why, *entry.advice]
    assert [text for text in texts if not re.search(r'[.?!]"?$', text)] == []
    assert [text for text in texts if "  " in text or text != text.strip()] == []


@each_entry
def test_there_is_always_something_to_do(entry):
    assert entry.advice


@each_entry
def test_codes_named_in_a_text_exist(entry):
    text = " ".join([entry.meaning, entry.why, *entry.advice])
    assert set(re.findall(r"GS\d{3}", text)) <= set(BY_CODE)


@each_entry
def test_words_that_the_project_does_not_use_do_not_appear(entry):
    text = " ".join([entry.summary, entry.meaning, entry.why, *entry.advice])
    banned = r"loss_scale|scale_factor|descale|offender|hyperparameter|has_nan"
    assert re.findall(banned, text) == []


def setting(device: str, make_scaler) -> dict[str, object]:
    """Return the names that examples take for granted."""
    model = torch.nn.Linear(4, 1, device=device)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.zeros_(model.bias)
    batch = torch.full((8, 4), 0.1, device=device)

    def loss_of(batch):
        with torch.autocast(device, torch.float16):
            return model(batch).float().square().mean()

    return {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
        "batch": batch,
        "batches": [batch * (1.0 + 0.1 * (i % 7)) for i in range(60)],
        "loss_of": loss_of,
        "scaler": make_scaler(device, model=model),
        "GradScaler": make_scaler,
        "DynamicScale": gradscale.DynamicScale,
        "StaticScale": gradscale.StaticScale,
    }


def codes_shown_by(
    snippet: str, monkeypatch: pytest.MonkeyPatch, device: str = "cpu"
) -> set[str]:
    """Run a snippet; return the codes of its verdicts, findings, warnings, errors.

    Every scaler is recorded, and findings are those of the run files.
    """
    codes, scalers = set(), []
    update = gradscale.torch.GradScaler.update

    def noting_update(self, *args):
        update(self, *args)
        codes.add(self.last.verdict.code)

    monkeypatch.setattr(gradscale.torch.GradScaler, "update", noting_update)
    # Optimizers of earlier snippets may not have been collected yet.
    gc.collect()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught,
    ):

        def make_scaler(*args, **kwargs):
            path = f"{folder}/{len(scalers)}.gs"
            scaler = gradscale.torch.GradScaler(*args, record=path, **kwargs)
            scalers.append(scaler)
            return scaler

        warnings.simplefilter("always")
        try:
            snippet = snippet.replace('"cuda"', f'"{device}"')
            exec(snippet, setting(device, make_scaler))
        except gradscale.GradscaleError as error:
            codes.add(error.code)
        for scaler in scalers:
            scaler.close()
        for path in Path(folder).glob("*.gs"):
            with open_run(path) as run:
                codes.update(finding.code for finding in diagnose_run(run).findings)
    said = [w.message for w in caught]
    return codes | {m.code for m in said if isinstance(m, gradscale.GradscaleWarning)}


# A Triton that cannot build a kernel; tests/torch/kernels/test_choice.py makes one.
NEEDS_BROKEN_TRITON = {"GS110"}
# Several ranks; tests/torch/parallel/test_mistakes.py runs it on two.
NEEDS_RANKS = {"GS111"}
# Observations that the torch room does not make yet: the overflow of a float16 loss,
# the scalers that one optimizer has had. The judge gives the codes from such facts.
NEEDS_OBSERVATION = {"GS206", "GS118"}
# A line on the console; tests/torch/precision/test_levels.py reads it.
NEEDS_CONSOLE = {"GS004"}
# MXNet, which has an environment of its own; tests/mxnet/test_trainers.py runs it.
NEEDS_MXNET = {"GS131"}
ELSEWHERE = (
    NEEDS_CONSOLE
    | NEEDS_ACCELERATOR
    | NEEDS_BROKEN_TRITON
    | NEEDS_RANKS
    | NEEDS_OBSERVATION
    | NEEDS_MXNET
)
RUNNABLE = [entry for entry in CATALOGUE if entry.code not in ELSEWHERE]


@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.code)
def test_an_example_leads_to_its_code(entry, monkeypatch, capsys):
    assert entry.code in codes_shown_by(entry.example, monkeypatch)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in RUNNABLE if entry.instead],
    ids=lambda entry: entry.code,
)
def test_what_to_use_instead_does_not_lead_to_the_code(entry, monkeypatch):
    assert entry.code not in codes_shown_by(entry.instead, monkeypatch)


@pytest.mark.parametrize("kind", ["example", "instead"])
@pytest.mark.parametrize("code", sorted(ELSEWHERE))
def test_an_example_that_runs_elsewhere_compiles(code, kind):
    compile(getattr(BY_CODE[code], kind), code, "exec")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="shows on an accelerator")
@pytest.mark.parametrize(("kind", "leads"), [("example", True), ("instead", False)])
@pytest.mark.parametrize("code", sorted(NEEDS_ACCELERATOR))
def test_an_example_for_an_accelerator_runs(code, kind, leads, monkeypatch):
    snippet = getattr(BY_CODE[code], kind)
    assert (code in codes_shown_by(snippet, monkeypatch, "cuda")) == leads
