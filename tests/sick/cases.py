"""The cause of each sick script, and the finding that `doctor` must report."""

from typing import NamedTuple


class Case(NamedTuple):
    """A cause, and the finding that must come first.

    Attributes:
        cause: The defect, in a sentence.
        code: Of the finding.
        verdict: Of the whole run.
        where: The module, or a parameter of it; None if the cause is in no module.
        contains: Text that the evidence or the advice must contain.
        runs: How often the script is run; the last run is judged.
    """

    cause: str
    code: str
    verdict: str
    where: str | None = None
    contains: str = ""
    runs: int = 1


# One folder each. Causes from public issues link to them.
CASES = {
    # https://github.com/NVIDIA/apex/issues/379
    "log_of_softmax": Case(
        "A softmax rounds to 0, and its logarithm is infinite.",
        "GS203",
        "collapse",
        where="head",
    ),
    "missing_values": Case(
        "From the middle of the table on, a column is NaN.",
        "GS203",
        "collapse",
        contains="input: 16 of 128 NaN",
    ),
    # https://github.com/k2-fsa/icefall/issues/1661
    "high_learning_rate": Case(
        "The learning rate is a hundred times too high, and the loss diverges.",
        "GS203",
        "collapse",
        contains="learning rate",
    ),
    "normalised_padding": Case(
        "The padding vector is 0, and is divided by its length in place.",
        "GS207",
        "collapse",
        where="embedding",
    ),
    "root_at_zero": Case(
        "Two items are equal, and the square root has no finite slope at 0.",
        "GS208",
        "collapse",
        where="distance",
        contains="sqrt",
    ),
    # https://github.com/huggingface/transformers/issues/5651
    "unscaled_attention": Case(
        "Attention scores without the division by a root overflow float16.",
        "GS203",
        "collapse",
        where="attention",
    ),
    # https://github.com/keras-team/keras/pull/17571
    "empty_sentences": Case(
        "A row of attention scores is fully masked.",
        "GS203",
        "collapse",
        where="pool",
    ),
    # https://github.com/mit-han-lab/efficientvit/issues/15
    "tiny_eps": Case(
        "An eps of 1e-8 is 0 in float16.",
        "GS203",
        "collapse",
        where="loudness",
    ),
    # https://github.com/hiyouga/LlamaFactory/issues/315
    "fixed_scale": Case(
        "The scale is reset to 2^24 after every step.",
        "GS205",
        "findings",
    ),
    # https://github.com/engichang1467/Open-Rig3R/issues/35
    "vanishing_gradients": Case(
        "At a scale of 1 all gradients are subnormal, and most are 0.",
        "GS209",
        "findings",
    ),
    "flushed_layers": Case(
        "At a scale of 1 the last layers learn, and the first ones get zeros.",
        "GS209",
        "findings",
    ),
    "summed_loss": Case(
        "A sum in float16 is infinite, though its gradients are not.",
        "GS203",
        "findings",
    ),
    # https://github.com/nerfstudio-project/nerfstudio/pull/1919
    "parameters_of_another": Case(
        "The optimizer holds the parameters of the teacher, not of the student.",
        "GS103",
        "findings",
    ),
    # https://github.com/facebookresearch/metaseq/issues/3
    "forgotten_scaler": Case(
        "A checkpoint holds model and optimizer but not the scaler.",
        "GS301",
        "findings",
        runs=2,
    ),
    "exploding_recurrence": Case(
        "Gradients grow with every step back in time, and sequences get longer.",
        "GS210",
        "findings",
        where="carry",
    ),
    "growing_exponent": Case(
        "The exponential of a learned variance overflows float16.",
        "GS203",
        "collapse",
        where="gaussian",
    ),
    "ignored_labels": Case(
        "Some batches have no label, and their mean is 0 / 0.",
        "GS203",
        "findings",
    ),
}
# Causes that have nothing to do with the learning rate.
BLAMELESS = set(CASES) - {"high_learning_rate", "exploding_recurrence"}
