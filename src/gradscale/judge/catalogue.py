"""The catalogue: one entry for each code a user can see.

Longer than other files because it is a table of texts, and one table is easier to
search than four.
"""

from dataclasses import dataclass

SECTIONS = {
    "GS0": "Normal",
    "GS1": "Wrong use",
    "GS2": "Numeric trouble",
    "GS3": "State and resume",
}
# The assumptions of every example.
GIVEN = (
    "The examples assume that model, optimizer, batch and batches exist; scaler is "
    'gradscale.torch.GradScaler("cuda", model=model); loss_of(batch) runs the model '
    "under float16 autocast and returns the loss."
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One code: its meaning and the remedies.

    Attributes:
        code: GS and three digits; the first digit is the section.
        name: The name of the code, in kebab case.
        summary: One sentence without a full stop.
        meaning: The conditions under which it is reported.
        why: The consequences, or why there are none.
        example: Python that leads to it.
        instead: Python with the same purpose that does not lead to it; empty if no
            other code would help.
        advice: Remedies, in the order in which to try them.
        references: Addresses of further pages.
    """

    code: str
    name: str
    summary: str
    meaning: str
    why: str
    example: str
    instead: str = ""
    advice: tuple[str, ...]
    references: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The title of the section the code belongs to."""
        return SECTIONS[self.code[:3]]


_AMP_EXAMPLES = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"

CATALOGUE = (
    Entry(
        code="GS000",
        name="ok",
        summary="The step was finite",
        meaning=(
            "The loss and every gradient were finite, and so was the gradient norm if "
            "it was computed."
        ),
        why="Nothing is wrong. Nearly every step of a healthy run has this verdict.",
        example="""\
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
if scaler.last:
    print(scaler.last.verdict)  # ok
""",
        advice=("Nothing to do.",),
    ),
    Entry(
        code="GS001",
        name="calibrated",
        summary="The scale has been calibrated",
        meaning=(
            "The run started with a scale that was too high, skipped a few steps while "
            "the scale backed off, and has been finite for ten steps in a row since. "
            "The message has the first scale, the present scale and the number of "
            "skipped batches."
        ),
        why=(
            "Nothing is wrong. Each halving costs one batch, once. This is the only "
            "line that a healthy run prints."
        ),
        example="""\
scaler = GradScaler("cuda", init_scale=2.0**32)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda", init_scale=2.0**10)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Nothing to do.",
            "To save the batches, start the next run with the calibrated scale: "
            "init_scale.",
        ),
    ),
    Entry(
        code="GS002",
        name="calibrating",
        summary="The initial scale was too high and is backing off",
        meaning=(
            "No step has been finite yet. Each non-finite step is skipped and backs "
            "the scale off, until the gradients fit. This is how the scale is "
            "calibrated at the start of a run."
        ),
        why=(
            "Nothing is wrong, as long as it ends. Each halving costs one batch: from "
            "2^16 usually none to a few, from 2^32 about sixteen more. The weights do "
            "not change."
        ),
        example="""\
scaler = GradScaler("cuda", init_scale=2.0**32)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    if scaler.last:
        print(scaler.last.verdict)  # calibrating, calibrating, ..., ok
""",
        instead="""\
scaler = GradScaler("cuda", init_scale=2.0**10)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Wait for the first applied step.",
            "To avoid the skips at the start, pass a lower init_scale; get_scale() at "
            "the end of an earlier run is a good value.",
            "If forty steps pass without an applied one, the scale is not the cause. "
            "Look at scaler.last.culprits; GS202 will follow.",
        ),
    ),
    Entry(
        code="GS003",
        name="probing",
        summary="The scale was raised one step ago and was then too high",
        meaning=(
            "After growth_interval finite steps in a row the scale is raised, to use "
            "more of the float16 range. Here the gradients did not fit: the step is "
            "skipped and the scale backs off again."
        ),
        why=(
            "Nothing is wrong. It costs one batch in growth_interval, one in 2000 by "
            "default, and keeps the scale as high as the gradients allow."
        ),
        example="""\
scaler = GradScaler("cuda", growth_interval=1)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    if scaler.last:
        print(scaler.last.verdict)  # ok, ok, ..., probing
""",
        advice=(
            "Nothing to do.",
            "If steps are expensive, as with very large batches, pass a longer "
            "growth_interval, or use StaticScale with a scale that is known to fit.",
        ),
    ),
    Entry(
        code="GS004",
        name="bfloat16-not-scaled",
        summary="Under bfloat16 the loss is not scaled",
        meaning=(
            "gradscale.torch.initialize() was called with dtype=torch.bfloat16 and no "
            "policy, so it chose NoScale. The same loop runs: scale() multiplies by 1."
        ),
        why=(
            "It is normal. bfloat16 has the exponents of float32, so gradients do not "
            "underflow. Steps with non-finite gradients are still skipped."
        ),
        example="""\
from gradscale.torch import initialize

model, optimizer, scaler = initialize(model, optimizer, dtype=torch.bfloat16)
""",
        advice=(
            "Nothing. To scale the loss nevertheless, pass policy=DynamicScale() to "
            "initialize().",
        ),
    ),
    Entry(
        code="GS101",
        name="setting-cannot-work",
        summary="A setting or an argument can never work",
        meaning=(
            "A value was rejected when it was passed: a factor that moves the scale in "
            "the wrong direction, bounds that exclude each other, a scale that is not "
            "a usable float32, two sets of settings at once. The message names the "
            "argument and its value."
        ),
        why=(
            "If it were accepted, the scale would stop moving, reach 0 or infinity, or "
            "leave its bounds, many steps later and without an error."
        ),
        example="""\
DynamicScale(growth_factor=1.0)
""",
        instead="""\
DynamicScale(growth_factor=2.0)
StaticScale(scale=1024.0)  # if the scale shall not move
""",
        advice=(
            "Change the argument that the message names.",
            "When in doubt, omit it: the defaults are those of torch.amp.GradScaler.",
            "To use a scale outside the bounds, change the bounds: "
            "policy=DynamicScale(init_scale=..., min_scale=..., max_scale=...).",
        ),
    ),
    Entry(
        code="GS102",
        name="call-order",
        summary="A method was called in the wrong order",
        meaning=(
            "One iteration is scale, backward, unscale_ if the gradients are needed "
            "unscaled, step, update. Each optimizer is unscaled and stepped at most "
            'once between two updates. The messages are those of torch: "unscale_() '
            'has already been called on this optimizer since the last update()", "No '
            'inf checks were recorded prior to update", and others.'
        ),
        why=(
            "Gradients would be divided by the scale twice or not at all, or be "
            "applied twice. Training would continue with wrong results."
        ),
        example="""\
scaler.scale(loss_of(batch)).backward()
scaler.unscale_(optimizer)
scaler.unscale_(optimizer)  # the gradients would be divided twice
""",
        instead="""\
optimizer.zero_grad()
scaler.scale(loss_of(batch)).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Put the calls in the order above; update() comes last, once for all "
            "optimizers.",
            "To clip, call scaler.clip_grad_norm_(optimizer, max_norm): it is correct "
            "before and after unscale_.",
            "If an iteration is abandoned, by an exception or a continue, call "
            "scaler.reset().",
        ),
        references=(_AMP_EXAMPLES,),
    ),
    Entry(
        code="GS103",
        name="no-gradients",
        summary="No parameter of an optimizer has a gradient",
        meaning=(
            "step() found nothing to do: every .grad of the optimizer is None. The "
            'step is not applied and the scale does not change. Where torch raises "No '
            'inf checks were recorded prior to update", this is a warning, issued once '
            "for each optimizer."
        ),
        why=(
            "In a branch that is not used in this iteration it is harmless. In every "
            "iteration it means that nothing is learned: the parameters are frozen, "
            "not part of the loss, or belong to a model that has been replaced."
        ),
        example="""\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = torch.nn.Linear(4, 1)  # the optimizer still holds the old one
scaler.scale(model(batch).mean()).backward()
scaler.step(optimizer)
scaler.update()
""",
        instead="""\
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler.scale(model(batch).mean()).backward()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Check requires_grad of the parameters, and that the loss depends on them.",
            "Create the optimizer after the model has been moved, wrapped or replaced.",
            "With several optimizers, call step() only for those whose loss was used.",
        ),
    ),
    Entry(
        code="GS104",
        name="backward-after-unscale",
        summary="backward() added to gradients that were already unscaled or clipped",
        meaning=(
            "The gradients of an optimizer had been unscaled or clipped in this "
            "iteration when another backward pass added to them. Or they were made "
            "before an update() that moved the scale, and the scaler did not know "
            "their optimizer yet: it brings the gradients of those that it knows to "
            'the new scale. A warning and a finding; with guard="raise" an error.'
        ),
        why=(
            "The sum mixes scaled with unscaled gradients, clipped with unclipped "
            "ones, or gradients of two scales. With a scale of 2^16 the second part "
            "of the first kind is 65536 times too large, and the step is wrong."
        ),
        example="""\
scaler.scale(loss_of(batch)).backward()
scaler.unscale_(optimizer)
scaler.scale(loss_of(batch)).backward()
""",
        instead="""\
scaler.scale(loss_of(batch) / 2).backward()
scaler.scale(loss_of(batch) / 2).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "When accumulating gradients, call unscale_() or clip_grad_norm_(), then "
            "step() and update(), only after the last backward pass.",
            "If the two passes belong to two iterations, call update() and "
            "zero_grad() between them.",
            "If an optimizer accumulates over updates that others make, call "
            "unscale_(), clip_grad_norm_() or step() with it once before the first.",
        ),
        references=(_AMP_EXAMPLES,),
    ),
    Entry(
        code="GS105",
        name="fp16-gradients",
        summary="The gradients to be unscaled are float16",
        meaning=(
            "Trainable parameters are float16, so their gradients are too. This is "
            'torch\'s "Attempting to unscale FP16 gradients.", with the names of the '
            "parameters. The usual cause is a checkpoint that was loaded in float16 "
            "and is then trained, fully or with LoRA."
        ),
        why=(
            "When they are divided by the scale, small float16 gradients become 0: the "
            "benefit of the scale is lost. Also, a float16 weight does not change if "
            "the update is smaller than about a thousandth of it."
        ),
        example="""\
model.half()
loss = model(batch.half()).float().mean()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
""",
        instead="""\
for param in model.parameters():
    if param.requires_grad:
        param.data = param.data.float()
with torch.autocast("cuda", torch.float16):
    loss = model(batch).float().mean()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
""",
        advice=(
            "Take an optimizer with float32 masters: from gradscale.torch.optim "
            "import AdamW.",
            "Or wrap yours: optimizer = gradscale.torch.master_weights(optimizer).",
            "For LoRA, call gradscale.torch.fp32_trainable_(model) before creating the "
            "optimizer and compute under torch.autocast. Frozen parameters may stay in "
            "float16.",
            "Optimizers of gradscale.torch.optim and fused optimizers of torch "
            "unscale in float32 inside their step: omit unscale_(), and clip with "
            "scaler.clip_grad_norm_(optimizer, max_norm).",
            "If another optimizer has float32 master weights of its own, pass "
            "allow_fp16=True to GradScaler.",
        ),
        references=(
            "https://huggingface.co/docs/peft/main/en/developer_guides/troubleshooting",
        ),
    ),
    Entry(
        code="GS106",
        name="gradient-cannot-be-unscaled",
        summary="A gradient cannot be read or unscaled correctly",
        meaning=(
            "A gradient has a dtype, a layout or a class that cannot be multiplied in "
            "place, overlaps the memory of another one, or was unscaled with one "
            "optimizer and changed before it was passed to another. The message names "
            "the parameter."
        ),
        why=(
            "If it were unscaled anyway, some elements would be divided twice or not "
            "at all."
        ),
        example="""\
first = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(model.parameters(), lr=0.1)
scaler.scale(loss_of(batch)).backward()
scaler.unscale_(first)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.unscale_(second)  # is this gradient scaled or not?
""",
        instead="""\
first = torch.optim.SGD([model.weight], lr=0.1)
second = torch.optim.SGD([model.bias], lr=0.1)
scaler.scale(loss_of(batch)).backward()
scaler.clip_grad_norm_([first, second], max_norm=1.0)
scaler.step(first)
scaler.step(second)
scaler.update()
""",
        advice=(
            "Give each parameter to one optimizer, and each parameter a dense "
            "gradient of its own in float16, bfloat16, float32, float64 or a complex "
            "type.",
        ),
    ),
    Entry(
        code="GS107",
        name="device-not-usable",
        summary="The device is not available or is not a device",
        meaning=(
            "Either the first argument of GradScaler is not the name of a device, for "
            "example a number in the position where older scalers took init_scale: an "
            "error. Or the device is not available on this machine: a warning, and the "
            "scaler is disabled; a command that was given the device exits. Without "
            'CUDA the warning is that of torch: "torch.cuda.amp.GradScaler is enabled, '
            'but CUDA is not available. Disabling."'
        ),
        why=(
            "A disabled scaler neither scales nor checks. Float16 gradients underflow, "
            "and non-finite steps reach the weights."
        ),
        example="""\
scaler = GradScaler(1024.0)
""",
        instead="""\
scaler = GradScaler("cuda", init_scale=1024.0)
""",
        advice=(
            "Pass the device first: GradScaler('cuda', init_scale=...). The older "
            "signature is gradscale.torch.cuda.amp.GradScaler(1024.0).",
            "To scale on the CPU, pass 'cpu'.",
            "To train without scaling on purpose and without the warning, pass "
            "enabled=False.",
        ),
    ),
    Entry(
        code="GS108",
        name="closure",
        summary="step() was given a closure, or lacks one",
        meaning=(
            "Some optimizers, such as LBFGS, call a closure that runs forward and "
            'backward again inside step(). The message is that of torch: "Closure use '
            'is not currently supported if GradScaler is enabled." The same code '
            "stands for step() of an optimizer that cannot do without a closure, and "
            "for a closure that returns something else than the loss before scaling."
        ),
        why=(
            "The backward pass inside the closure would produce scaled gradients after "
            "those of this step were checked and unscaled."
        ),
        example="""\
def closure():
    optimizer.zero_grad()
    loss = loss_of(batch)
    scaler.scale(loss).backward()
    return loss


closure()
scaler.step(optimizer, closure)
""",
        instead="""\
from gradscale.torch import step_with_closure


def closure():
    optimizer.zero_grad()
    loss = loss_of(batch)
    scaler.scale(loss).backward()
    return loss


step_with_closure(scaler, optimizer, closure)
scaler.update()
""",
        advice=(
            "Call gradscale.torch.step_with_closure(scaler, optimizer, closure).",
            "With an optimizer that needs no closure, call the closure once yourself, "
            "and do not pass it to step().",
        ),
    ),
    Entry(
        code="GS109",
        name="scale-tensor-ignored",
        summary="A scale tensor passed to update() was out of bounds and ignored",
        meaning=(
            "update(new_scale) got a tensor on an accelerator. It is compared with the "
            "bounds on the device, without a sync; it was outside, so the scale did "
            "not change. The warning comes a few updates later, when the result has "
            "reached the host. A number, or a tensor on the CPU, is rejected at once "
            "(GS101)."
        ),
        why=(
            "The run continues with a different scale than the requested one. A scale "
            "of 0, NaN or infinity would have made every gradient unusable."
        ),
        example="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update(torch.tensor(0.0, device="cuda"))
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update(torch.tensor(1024.0, device="cuda"))
""",
        advice=(
            "Find out why the computed scale leaves the bounds; it may be NaN.",
            "If the scale is intended, widen the bounds: "
            "policy=DynamicScale(min_scale=..., max_scale=...).",
        ),
    ),
    Entry(
        code="GS110",
        name="triton-failed",
        summary="Triton could not build or start a kernel; plain PyTorch is used",
        meaning=(
            "On a GPU the scaler and its optimizers run Triton kernels. Triton "
            "compiles them on first use, for which it needs a C compiler, a matching "
            "driver and a supported GPU. One of these failed; the message contains "
            "Triton's error. From here on plain PyTorch operations are used. No data "
            "was lost: a kernel that does not start has written nothing."
        ),
        why=(
            "The results are the same up to rounding, but a step takes longer: the "
            "gradients are read more than once, and each operation is a separate "
            "launch."
        ),
        example="""\
# On a machine without a C compiler.
scaler = GradScaler("cuda")
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda", kernels="plain")
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Install what the message names, usually a C compiler such as gcc.",
            "Install the Triton version that belongs to your PyTorch: pip show torch "
            "lists it.",
            "Pass kernels='triton' to raise the error where it occurs.",
            "Pass kernels='plain' to run without Triton and without this warning.",
        ),
    ),
    Entry(
        code="GS111",
        name="ranks-apart",
        summary="The ranks are out of step or have different settings",
        meaning=(
            "Ranks that hold parts of the same gradients decide together: in every "
            "step they exchange their gradient statistics and their position. These "
            "differed: another policy, another number of updates, another call; or one "
            "rank found gradients that it cannot use. Or the process group cannot be "
            "derived from the parameters."
        ),
        why=(
            "A rank that decides by other rules gets another scale, steps where the "
            "others skip, and ends up with different weights, without an error. A rank "
            "that is one call behind makes the others wait forever."
        ),
        example="""\
# On every rank; fully_shard has cut the model.
late = torch.distributed.get_rank() == 1
scaler = GradScaler("cuda", init_scale=2.0**12 if late else 2.0**16)
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
""",
        instead="""\
# On every rank; fully_shard has cut the model.
scaler = GradScaler("cuda", init_scale=2.0**12)
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
""",
        advice=(
            "Give every rank the same policy and guard.",
            "Load the same checkpoint on every rank, or on none.",
            "Call clip_grad_norm_, step and update equally often on every rank, also "
            "on one without gradients in this iteration.",
            "If a rank stopped by itself, read its own error.",
            "Pass process_group= if the parameters are on meshes without a common "
            "group.",
        ),
    ),
    Entry(
        code="GS112",
        name="clipped-while-scaled",
        summary="Gradients are clipped before they are unscaled",
        meaning=(
            "In most of the sampled steps the gradients were written to between "
            "backward and the scaler, their norm or their peak was always the same, "
            "and it was far below the scale: a clip that was meant for unscaled "
            "gradients."
        ),
        why=(
            "With a scale of 2^16, a norm of 1 is 2^-16 once unscaled. SGD nearly "
            "stands still; the step size of Adam hides it, and the clipping has no "
            "longer anything to do with max_norm."
        ),
        example="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Call scaler.unscale_(optimizer) before you clip.",
            "Or call scaler.clip_grad_norm_(optimizer, max_norm), which does both.",
        ),
        references=(_AMP_EXAMPLES,),
    ),
    Entry(
        code="GS113",
        name="unscaled-twice",
        summary="Gradients are divided by the scale by hand and again by the scaler",
        meaning=(
            "In most of the sampled steps the gradients were written to between "
            "backward and the scaler, and the largest of them was then below 8 at a "
            "scale of 2^10 or more: they had been unscaled already."
        ),
        why="Every update is smaller than intended by the factor of the scale.",
        example="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    for param in model.parameters():
        param.grad /= scaler.get_scale()
    scaler.step(optimizer)  # divides again
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.unscale_(optimizer)  # step() does not divide again
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Remove the division; scaler.step() unscales. If the unscaled gradients "
            "are needed before the step, call scaler.unscale_(optimizer).",
        ),
    ),
    Entry(
        code="GS114",
        name="backward-of-unscaled-loss",
        summary="backward() runs on a loss that was not scaled",
        meaning=(
            "In most of the sampled steps scale() was called, and gradients came from "
            "the backward pass of another tensor than the one it returned: all of "
            "them, or those of one loss of several, which was not scaled or was scaled "
            "by another scaler. step() divides them by the scale all the same. In the "
            "first step it is a warning, with guard='raise' an error."
        ),
        why=(
            "The gradients underflow as without a scaler, and updates are smaller than "
            "intended by the factor of the scale."
        ),
        example="""\
for batch in batches:
    optimizer.zero_grad()
    loss = loss_of(batch)
    scaler.scale(loss)  # returns the scaled loss
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Call scaler.scale(loss).backward(), for every loss that reaches these "
            "parameters.",
        ),
    ),
    Entry(
        code="GS115",
        name="stepped-without-scaler",
        summary="optimizer.step() was called directly on scaled gradients",
        meaning=(
            "In a sampled step of a recorded run, an optimizer stepped without the "
            "scaler while its gradients were as backward of the scaled loss had left "
            "them. A direct step after unscale_() is named only if a weight is not "
            "finite since (GS207)."
        ),
        why=(
            "The update is larger than intended by the factor of the scale, and "
            "non-finite gradients reach the weights."
        ),
        example="""\
body = torch.optim.SGD([model.weight], lr=1e-6)
head = torch.optim.SGD([model.bias], lr=1e-6)
for batch in batches:
    model.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(body)
    head.step()
    scaler.update()
""",
        instead="""\
body = torch.optim.SGD([model.weight], lr=1e-6)
head = torch.optim.SGD([model.bias], lr=1e-6)
for batch in batches:
    model.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(body)
    scaler.step(head)
    scaler.update()
""",
        advice=(
            "Call scaler.step(optimizer) for every optimizer.",
            "Load a checkpoint from before the first direct step if the loss rose.",
        ),
    ),
    Entry(
        code="GS116",
        name="gradients-not-cleared",
        summary="Gradients are not cleared between steps",
        meaning=(
            "In all sampled steps, six or more, backward added to the gradients of the "
            "step before."
        ),
        why=(
            "Every update repeats all earlier gradients, and one that is not finite "
            "makes every later step fail, at any scale."
        ),
        example="""\
for batch in batches:
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Call optimizer.zero_grad() before every backward pass or after every "
            "step.",
        ),
    ),
    Entry(
        code="GS117",
        name="cleared-before-step",
        summary="Gradients are cleared between backward and the step",
        meaning=(
            "In most of the sampled steps the gradients of backward were gone, or all "
            "0, when the scaler read them."
        ),
        why="Nothing is learned, or only from the last part of each window.",
        example="""\
for batch in batches:
    scaler.scale(loss_of(batch)).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        advice=("Move zero_grad() before backward or after the step.",),
    ),
    Entry(
        code="GS118",
        name="scaler-made-anew",
        summary="A new scaler is made again and again while training goes on",
        meaning=(
            "Three scalers or more were made in one process, for instance one for each "
            "epoch, while the optimizer stayed the same or went on from its saved "
            "state."
        ),
        why=(
            "Each starts at init_scale: the scale that was found is lost, and the "
            "steps that find it again are skipped."
        ),
        example="""\
for epoch in range(3):
    scaler = GradScaler("cuda")
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda")
for epoch in range(3):
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
        advice=(
            "Create the scaler once, beside the optimizer.",
            "Across processes, save scaler.state_dict() and load it (GS301).",
        ),
    ),
    Entry(
        code="GS119",
        name="not-in-optimizer",
        summary="Parameters get gradients and are in no optimizer",
        meaning=(
            "After the fourth update of a recorded run, trainable parameters of the "
            "model have a gradient and belong to no optimizer of the process: they "
            "were left out, or replaced after the optimizer was created."
        ),
        why="They keep their initial values.",
        example="""\
optimizer = torch.optim.SGD([model.weight], lr=1e-6)  # without the bias
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Create the optimizer after the model is complete, or call "
            "optimizer.add_param_group().",
            "If the parameters are to stay fixed, call requires_grad_(False).",
        ),
    ),
    Entry(
        code="GS120",
        name="float16-weights",
        summary="Trainable parameters are float16, without float32 copies",
        meaning=(
            "An optimizer steps float16 parameters, and it is none of "
            "gradscale.torch.optim, which keep float32 copies of them."
        ),
        why=(
            "An update below 2^-11 of a weight is rounded away, and the state of Adam "
            "underflows: its eps of 1e-8 is 0 in float16. No scale helps."
        ),
        example="""\
model.half()
scaler = GradScaler("cuda", allow_fp16=True)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(model(batch.half()).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(batch).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Take an optimizer with float32 masters: from gradscale.torch.optim "
            "import AdamW.",
            "Or wrap yours: optimizer = gradscale.torch.master_weights(optimizer).",
            "Or keep the parameters in float32 and compute under torch.autocast. For "
            "LoRA, gradscale.torch.fp32_trainable_(model) casts the trained ones.",
            "If your optimizer keeps float32 copies of its own, there is nothing to "
            "do.",
        ),
    ),
    Entry(
        code="GS121",
        name="nothing-is-float16",
        summary="Nothing is float16: scaling has no effect",
        meaning=(
            "The graph of the loss has no float16 tensor: autocast is missing, does "
            "not include the forward pass, or has another dtype (bfloat16 is the "
            "default on the CPU)."
        ),
        why=(
            "Neither speed nor memory is gained, and float32 and bfloat16 have the "
            "range without a scale."
        ),
        example="""\
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(batch).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Run the forward pass under torch.autocast(device, dtype=torch.float16).",
            "To train in float32 or bfloat16, remove the scaler or pass enabled=False.",
        ),
    ),
    Entry(
        code="GS122",
        name="stepped-inside-window",
        summary="step() and update() run several times before gradients are cleared",
        meaning=(
            "In most of the sampled steps backward added to the gradients of the step "
            "before, and in some they had been cleared: the gradients are cleared once "
            "a window of micro-batches, and step() and update() are called once a "
            "micro-batch."
        ),
        why=(
            "The first micro-batch of a window is used in every step of it, and the "
            "scale may change in the middle of a sum."
        ),
        example="""\
for index, batch in enumerate(batches):
    scaler.scale(loss_of(batch) / 4).backward()
    scaler.step(optimizer)
    scaler.update()
    if index % 4 == 3:
        optimizer.zero_grad()
""",
        instead="""\
for index, batch in enumerate(batches):
    scaler.scale(loss_of(batch) / 4).backward()
    if index % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        advice=(
            "Call step() and update() once a window, after its last backward pass.",
            "Or clear the gradients after every step.",
        ),
        references=(_AMP_EXAMPLES,),
    ),
    Entry(
        code="GS123",
        name="update-missing",
        summary="Losses are scaled, and no step() and update() follow",
        meaning=(
            "Between two updates, or after the last one, eight times as many losses "
            "were scaled as usual, or more: the loop leaves out step() and update(), "
            "for instance when a norm is not finite. Reported at the end of the run."
        ),
        why=(
            "Only update() lowers the scale. A loop that leaves it out because the "
            "scale is too high never gets a lower one."
        ),
        example="""\
scaler = GradScaler("cuda", growth_interval=4)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    if not all(param.grad.isfinite().all() for param in model.parameters()):
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda", growth_interval=4)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)  # skips by itself
    scaler.update()
""",
        advice=(
            "Call scaler.step(optimizer) and scaler.update() in every iteration: the "
            "scaler skips non-finite steps itself.",
        ),
    ),
    Entry(
        code="GS124",
        name="write-through-data",
        summary="A write through .data to a half-precision parameter is undone",
        meaning=(
            "A parameter with a float32 master was written to through .data after a "
            "step: weights were clipped, averaged or restored that way. Such a write "
            "does not change the version counter, so it is not noticed by every step. "
            "A sampled comparison of parameters and masters has found it."
        ),
        why=(
            "The next step writes the rounded master into the parameter, and the write "
            "is lost."
        ),
        example="""\
from gradscale.torch.optim import SGD

model.half()
optimizer = SGD(model.parameters(), lr=1e-6)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(model(batch.half()).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    for param in model.parameters():
        param.data.clamp_(-0.25, 0.25)
""",
        instead="""\
from gradscale.torch.optim import SGD

model.half()
optimizer = SGD(model.parameters(), lr=1e-6)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(model(batch.half()).float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.25, 0.25)
""",
        advice=(
            "Write to the parameter itself under torch.no_grad().",
            "Or pass check_data=True to the optimizer or to master_weights(): every "
            "step then compares all parameters with their masters.",
        ),
    ),
    Entry(
        code="GS125",
        name="eps-zero-in-float16",
        summary="An optimizer without masters has an eps that is 0 in float16",
        meaning=(
            "The scaler was made with allow_fp16=True, and an optimizer that steps "
            "float16 parameters without float32 masters has an eps below 2^-25. It is "
            "refused before its first step."
        ),
        why=(
            "In float16 the eps is 0. Where a gradient is 0, as in the first step of "
            "LoRA, or its square underflows, the step divides by 0 and every weight "
            "becomes NaN."
        ),
        example="""\
model.half()
optimizer = torch.optim.AdamW(model.parameters())
scaler = GradScaler("cuda", allow_fp16=True)
scaler.scale(model(batch.half()).float().square().mean()).backward()
scaler.step(optimizer)
""",
        instead="""\
from gradscale.torch.optim import AdamW

model.half()
optimizer = AdamW(model.parameters())
scaler = GradScaler("cuda")
scaler.scale(model(batch.half()).float().square().mean()).backward()
scaler.step(optimizer)
""",
        advice=(
            "Use the optimizer of the same name from gradscale.torch.optim: it keeps "
            "float32 masters and state.",
            "Or wrap yours: optimizer = gradscale.torch.master_weights(optimizer).",
            "For LoRA, call gradscale.torch.fp32_trainable_(model) and compute under "
            "torch.autocast.",
            "To stay in float16, pass eps=1e-4 to the optimizer.",
        ),
    ),
    Entry(
        code="GS131",
        name="updated-on-kvstore",
        summary="An MXNet trainer updates its weights on the key-value store",
        meaning=(
            "A Gluon Trainer whose weights are updated by the key-value store was "
            "given a loss scaler: update_on_kvstore=True, sparse weights, or an "
            "asynchronous store. It is refused before its first step. With "
            "update_on_kvstore=None, MXNet's default, gradscale.mxnet chooses False."
        ),
        why=(
            "The store updates the weights while it sums the gradients, before they "
            "can be checked. MXNet's own scaler lets an infinite gradient reach the "
            "weights in this mode."
        ),
        example="""\
import mxnet
from gradscale.mxnet import amp

net = mxnet.gluon.nn.Dense(1, in_units=4)
net.initialize()
trainer = mxnet.gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=True)
amp.init_trainer(trainer)
""",
        instead="""\
import mxnet
from gradscale.mxnet import amp

net = mxnet.gluon.nn.Dense(1, in_units=4)
net.initialize()
trainer = mxnet.gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
amp.init_trainer(trainer)
""",
        advice=(
            "Pass update_on_kvstore=False to mxnet.gluon.Trainer.",
            "Use dense weights; gradients may be sparse.",
            "Use a synchronous store: dist_sync or dist_device_sync.",
        ),
    ),
    Entry(
        code="GS201",
        name="overflow",
        summary="A gradient was not finite; the step was skipped",
        meaning=(
            "Earlier steps were finite, the loss is finite, and the scale was not "
            "raised just before: a gradient of this batch does not fit. The step is "
            "skipped, the scale backs off, the weights do not change. A finding if 20 "
            "of 100 steps are skipped; it names the scale as the cause only if the "
            "gradients before were close to 65504 or the scale was just raised."
        ),
        why=(
            "An occasional skip is harmless: one batch with large gradients is lost. "
            "Skips every few steps waste batches, and a scale that keeps falling has "
            "another cause and leads to GS202."
        ),
        example="""\
for batch in (batch, batch, 100.0 * batch):
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
if scaler.last:
    print(scaler.last.verdict, scaler.last.culprits)  # overflow
""",
        advice=(
            "One skip now and then: nothing to do. Step schedulers only after applied "
            "steps: if scaler.last and scaler.last.applied: scheduler.step().",
            "Many skips from rare outliers, as in reinforcement learning: pass "
            "policy=DynamicScale(tolerance=0.01), and one overflow in a hundred steps "
            "no longer lowers the scale.",
            "Always the same culprits in scaler.last.culprits: run that module under "
            "torch.autocast(device, enabled=False).",
            "A model that was pre-trained in bfloat16 may not fit into float16 at any "
            "scale. Train it in bfloat16.",
        ),
        references=("https://arxiv.org/abs/1710.03740",),
    ),
    Entry(
        code="GS202",
        name="collapse",
        summary="The scale is at its floor and gradients are still not finite",
        meaning=(
            "The scale has backed off to min_scale, 2^-24 by default, and three steps "
            "in a row were not finite there. ScaleCollapsed is raised. Every step with "
            "non-finite gradients was skipped: the weights are those of the last "
            "applied step. Torch would continue to a scale of 0."
        ),
        why=(
            "No scale can help: at the floor the gradients are smaller than without "
            "scaling. A loss, an input or a weight is not finite, or the model does "
            "not fit into float16."
        ),
        example="""\
model.weight.data[0, 0] = float("nan")
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()  # 2^16, 2^15, ..., 2^-24, ScaleCollapsed
""",
        advice=(
            "Check in the message whether the loss was finite. If not, see GS203.",
            "Are the weights finite? all(p.isfinite().all() for p in "
            "model.parameters()). If not, they were so before the scaler read them: "
            "load an earlier checkpoint.",
            "Is the batch finite, labels and masks included?",
            "If loss, weights and batch are finite, the backward pass itself "
            "overflows. Run the module of the first culprit under "
            "torch.autocast(device, enabled=False), or train in bfloat16.",
            'guard="raise" holds the scale while the loss is not finite, so that the '
            "run can continue once the cause is fixed.",
        ),
    ),
    Entry(
        code="GS203",
        name="loss-not-finite",
        summary="The loss was not finite before it was scaled",
        meaning=(
            "The forward pass returned a loss of NaN or infinity. The step is skipped "
            "unless all gradients are finite. By default the scale then backs off as "
            'in torch, although that cannot help; with guard="raise" it is held. '
            "Neighbouring lost steps are one episode and one finding, whatever mixture "
            "of losses, gradients and norms was not finite: after 8 lost steps in a "
            "row if the location is known, else after 10, or once the run recovers or "
            "ends."
        ),
        why=(
            "The scale is not the cause and no scale can fix it. A skipped step leaves "
            "the weights unchanged, but the forward pass has run: BatchNorm statistics "
            "may be contaminated. A step with finite gradients is applied, as in "
            "torch, and may damage the weights: scaler.last.applied shows it."
        ),
        example="""\
with torch.autocast("cuda", torch.float16):
    probability = torch.sigmoid(model(batch) + 30.0)  # 1 in float16
    loss = -torch.log(1.0 - probability).mean()  # log(0)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        instead="""\
with torch.autocast("cuda", torch.float16):
    loss = -torch.nn.functional.logsigmoid(-(model(batch) + 30.0)).mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Check the batch: NaN, infinity, empty masks, labels out of range.",
            "Look for values that float16 cannot represent: log and division near 0, "
            "an epsilon below 6e-8, 1 - 1e-6 (which is 1), masks of -65504 with "
            "something added, activations above 65504.",
            "Use the fused functions that take logits, or compute the loss in float32.",
            "After a bad batch, check running_mean and running_var of BatchNorm "
            "layers, or load a checkpoint.",
        ),
    ),
    Entry(
        code="GS204",
        name="norm-overflow",
        summary="Every gradient is finite and their norm is not a usable float32",
        meaning=(
            "clip_grad_norm_() was called and every element is finite, but the norm of "
            "the unscaled gradients is above 3.4e38, or the clipping factor is below "
            "the smallest normal float32. The step is skipped and the scale backs off."
        ),
        why=(
            "If they were clipped by such a norm, all gradients would become 0 or lose "
            "precision, and the step would be applied without an error. Gradients of "
            "this size are not a rounding problem: the training has diverged."
        ),
        example="""\
model = torch.nn.Linear(4, 1, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler.scale(1e39 * model(batch.double()).mean()).backward()
scaler.clip_grad_norm_(optimizer, max_norm=1.0)  # inf
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Look at the loss of the last steps: a learning rate that is too high, a "
            "missing warm-up, a sum instead of a mean.",
            "If max_norm is tiny, below 1e-30 or so, pass a larger one.",
        ),
    ),
    Entry(
        code="GS205",
        name="static-scale-skipped",
        summary="A step was skipped at a scale that cannot back off",
        meaning=(
            "The policy is StaticScale or NoScale and a gradient was not finite. The "
            "step was skipped. The warning is issued once, a few updates later; "
            "scaler.skipped_steps counts all skips. A finding after 10 skips in a row "
            "or 20 of 100 steps at one scale, also if update(new_scale) keeps it."
        ),
        why=(
            "A fixed scale does not move. If it is too high for this model, every step "
            "may be skipped from here on and the model no longer learns."
        ),
        example="""\
scaler = GradScaler("cuda", policy=StaticScale(scale=2.0**32))
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda", policy=DynamicScale(init_scale=2.0**32))
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Compare scaler.skipped_steps with scaler.applied_steps: one skip in "
            "thousands is harmless.",
            "Lower the scale by a factor of 2 to 16, or use DynamicScale.",
            "If it also happens at a scale of 1, the scale is not the cause: see "
            "GS203.",
        ),
    ),
    Entry(
        code="GS206",
        name="loss-overflow",
        summary="The loss was finite and overflowed its dtype when it was scaled",
        meaning=(
            "The loss is float16, and loss times scale is above 65504: a loss of 3.5 "
            "fits at 2^14 and not at 2^15. Or the loss is float32 and the product is "
            "above 3.4e38, at a very high scale. The product is infinite before "
            "backward begins, and so is every gradient. The step is skipped and the "
            "scale backs off."
        ),
        why=(
            "The loss, a single number, limits the scale although the gradients would "
            "allow a higher one. Gradients that need the higher scale underflow."
        ),
        example="""\
loss = (3.5 + loss_of(batch)).half()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        instead="""\
loss = 3.5 + loss_of(batch)
scaler.scale(loss.float()).backward()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "A float16 loss: compute it in float32, scaler.scale(loss.float()).",
            "A float32 loss: pass a lower max_scale, "
            "policy=DynamicScale(max_scale=2.0**24), or return a mean instead of a "
            "sum.",
            "Inside torch.autocast most PyTorch losses return float32; look for a "
            "half() or to(torch.float16) after them.",
        ),
    ),
    Entry(
        code="GS207",
        name="weights-not-finite",
        summary="A weight is NaN or infinite",
        meaning=(
            "A parameter of the model is not finite. The loss and the gradients are "
            "then not finite either, at every scale and for every batch."
        ),
        why=(
            "No later result is usable, and no scale restores the weight. The scaler "
            "skips every step with non-finite gradients, so the weight was written by "
            "other code."
        ),
        example="""\
with torch.no_grad():
    model.weight[0, 0] = float("inf")
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Load a checkpoint from before the step in the message.",
            "Look for optimizer.step() without the scaler, a learning rate that is "
            "not finite, weights kept in float16, and a first checkpoint that was "
            "already bad.",
        ),
    ),
    Entry(
        code="GS208",
        name="not-finite-at-any-scale",
        summary="Gradients are not finite at any scale",
        meaning=(
            "The loss is finite, the gradients are not, and a scale 2^8 times lower "
            "(2^10 without NaN) has not changed that over 8 steps in a row or more. "
            "Before the first finite step, the scale must also have reached 2^-8, and "
            "NaN must not have turned into infinity on the way. Short episodes are "
            "GS211."
        ),
        why=(
            "An overflow that is caused by the scale ends when the scale falls. This "
            "one did not: the backward pass itself produces NaN or infinity. No step "
            "will be applied until that is fixed."
        ),
        example="""\
for batch in batches:
    optimizer.zero_grad()
    distance = (model(batch) - model(batch)).square().sum().sqrt()
    scaler.scale(distance).backward()  # the derivative of a root at 0
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in batches:
    optimizer.zero_grad()
    distance = ((model(batch) - model(batch)).square().sum() + 1e-6).sqrt()
    scaler.scale(distance).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "NaN: look for a root, a norm, a power or a division at 0 and for masks "
            "of infinity. Keep the argument away from 0 before the operation.",
            "Infinity only: run the module of the first culprit under "
            "torch.autocast(device, enabled=False), or train in bfloat16.",
            "Few tensors of many: check the module of scaler.last.culprits[0]. All "
            "tensors: check the loss function or the last layers.",
        ),
    ),
    Entry(
        code="GS209",
        name="underflow",
        summary="The scale is so low that gradients vanish",
        meaning=(
            "A fifth of the gradient elements or more, in two samples, were too small "
            "for float16 at this scale; or for a hundred steps every gradient was "
            "below 2^-14, the smallest normal float16; or, in four samples, the same "
            "layer lost its gradients although 8 bits of headroom were unused, or "
            "because a cast to float16 flushes them to 0. The evidence then has the "
            "layer."
        ),
        why=(
            "Values below 2^-25 round to 0 in float16. The steps are applied and look "
            "healthy, but most of the gradient is lost: the loss flattens early."
        ),
        example="""\
scaler = GradScaler("cuda", policy=StaticScale(scale=2.0**-14))
for batch in 2 * batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda", policy=StaticScale(scale=2.0**10))
for batch in 2 * batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "With headroom left, raise the scale to the one in the message, or use "
            "DynamicScale.",
            "One layer only: raise the weight of the loss that reaches it.",
            "Without headroom, the gradients span more than the range of float16: "
            "train in bfloat16, or keep the layers with the largest gradients in "
            "float32.",
            "If the scale had fallen before, find the cause of the fall: GS210, GS201.",
        ),
        references=("https://arxiv.org/abs/1710.03740",),
    ),
    Entry(
        code="GS210",
        name="scale-falling",
        summary="The scale or the headroom is falling",
        meaning=(
            "The scale is several backoffs below its mean over the last 5000 steps, "
            "further than growth and backoff have taken it so far; or gradients have "
            "grown to sixteen times their usual size and float16 is nearly full; or "
            "gradients have grown by six bits since the first steps and the scale has "
            "fallen by as much. Reported once, and again if the fall is twice as deep."
        ),
        why=(
            "The run is still healthy, and may stay so. But in large runs that were "
            "lost this came first: tens of steps before the loss rose in GLM-130B, "
            "more than a thousand steps before in BigScience 104B."
        ),
        example="""\
for step, batch in enumerate(5 * batches):
    optimizer.zero_grad()
    growth = 2.0 ** (max(0, step - 220) // 4)
    scaler.scale(growth * loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
for batch in 5 * batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "Keep a checkpoint from before the step at which the fall began.",
            "Compare the loss and the gradient norm with those of that step. If they "
            "rise, return to it with a lower learning rate or a smaller clipping norm.",
            "If there are few culprits, monitor their module or run it in float32.",
        ),
        references=(
            "https://github.com/THUDM/GLM-130B/blob/main/logs/main-log-en.md",
            "https://github.com/bigscience-workshop/bigscience/blob/"
            "master/train/tr8-104B-wide/chronicles.md",
        ),
    ),
    Entry(
        code="GS211",
        name="nonfinite-with-headroom",
        summary="Gradients are not finite now and then, and the scale is not the cause",
        meaning=(
            "There were several short episodes of non-finite gradients, at different "
            "scales: three if all had NaN, else five. Before each, the gradients were "
            "six bits or more below 65504, and the scale had not just been raised. One "
            "is enough where the forward pass made a non-finite value, which the loss "
            "does not show."
        ),
        why=(
            "Every one of them lowers the scale, and none needs it: batches are lost, "
            "and small gradients underflow at the lower scale."
        ),
        example="""\
scaler = GradScaler("cuda", init_scale=2.0**10)
for step, batch in enumerate(batches):
    optimizer.zero_grad()
    loss = loss_of(batch)
    if step % 12 == 11:
        loss = loss + (model(batch) - model(batch)).square().sum().sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        instead="""\
scaler = GradScaler("cuda", init_scale=2.0**10)
for step, batch in enumerate(batches):
    optimizer.zero_grad()
    loss = loss_of(batch)
    if step % 12 == 11:
        loss = loss + ((model(batch) - model(batch)).square().sum() + 1e-6).sqrt()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        advice=(
            "If they come at equal distances, check the batch that comes back in every "
            "epoch.",
            "NaN: look for a root, a norm or a power at 0, 0/0, a mask of infinity.",
            "Replay such a batch: scaler.diagnose(closure) names the operation.",
        ),
    ),
    Entry(
        code="GS301",
        name="resumed-without-state",
        summary="The optimizer was resumed and the scaler was not",
        meaning=(
            "At the scaler's first step, the optimizer already had a state: the run "
            "was resumed, and the scaler's state was not saved or not loaded. Or the "
            "optimizer was trained without a scaler before, which is fine. Reported "
            "once, and only for optimizers that keep a state."
        ),
        why=(
            "The scale starts from init_scale and the count of finite steps from 0. "
            "Steps may be skipped while the scale recalibrates, or small gradients "
            "underflow until it has grown back, so the run will not match an "
            "uninterrupted one."
        ),
        example="""\
optimizer = torch.optim.AdamW(model.parameters())
loss_of(batch).backward()
optimizer.step()
saved = optimizer.state_dict()

optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(saved)
scaler = GradScaler("cuda", model=model)
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
""",
        instead="""\
optimizer = torch.optim.AdamW(model.parameters())
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
saved = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}

optimizer = torch.optim.AdamW(model.parameters())
optimizer.load_state_dict(saved["optimizer"])
scaler = GradScaler("cuda", model=model)
scaler.load_state_dict(saved["scaler"])
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Save scaler.state_dict() after update(), with the model and the "
            "optimizer, and call scaler.load_state_dict() before the first step.",
            "A state of apex, DeepSpeed, Megatron-Core or fairseq: "
            "scaler.load_state_dict(gradscale.import_state(saved)).",
            "If the state is lost, continue: the scale is recalibrated within a few "
            "steps (GS002). An init_scale near the last known scale shortens this.",
            "If the optimizer was trained without a scaler before, there is nothing "
            "to do.",
        ),
    ),
    Entry(
        code="GS302",
        name="bad-checkpoint",
        summary="A checkpoint cannot be loaded",
        meaning=(
            "load_state_dict() got a dict that is empty, lacks a key, or has an "
            "unusable value, such as a scale of 0 or NaN; or the state of an optimizer "
            "has an entry that does not match its parameter. The message names the key "
            "and the value. Nothing was changed."
        ),
        why=(
            "A resumed run would start from a different state than the saved one: "
            "steps would be skipped again, or gradients would not be finite from the "
            "first step."
        ),
        example="""\
scaler.load_state_dict({"scale": 65536.0})
""",
        instead="""\
saved = scaler.state_dict()  # after update(), beside model and optimizer
scaler.load_state_dict(saved)
""",
        advice=(
            "Save the complete scaler.state_dict(), not only the scale.",
            "A disabled scaler saves an empty dict: save from an enabled one.",
            "A scale outside the bounds of the policy: widen them with "
            "policy=DynamicScale(min_scale=..., max_scale=...) before loading.",
            "If the checkpoint is lost, start without it: the scale is recalibrated "
            "within a few steps (GS002).",
        ),
    ),
    Entry(
        code="GS303",
        name="newer-checkpoint",
        summary="The checkpoint has a format that this version does not read",
        meaning=(
            "The checkpoint was written by a newer version of gradscale. Every version "
            "reads the formats of all earlier versions, and none of a later one. "
            "Nothing was changed."
        ),
        why=(
            "Fields that this version does not know would be dropped, and the resumed "
            "run would differ from the saved one."
        ),
        example="""\
saved = scaler.state_dict()
saved["gradscale"]["format"] = 1000
scaler.load_state_dict(saved)
""",
        instead="""\
saved = scaler.state_dict()
del saved["gradscale"]  # leaves the five keys of torch.amp.GradScaler
scaler.load_state_dict(saved)
""",
        advice=(
            "Install the version of gradscale that wrote it, or a newer one.",
            'If that is not possible, delete the key "gradscale": scale, factors and '
            "the count of finite steps are kept, the bounds come from the policy in "
            "use.",
        ),
    ),
    Entry(
        code="GS304",
        name="foreign-checkpoint",
        summary="The state of another scaler must be imported",
        meaning=(
            "load_state_dict() got the state of apex, DeepSpeed, Megatron-Core, "
            "fairseq, flax or jmp; or import_state() got a value that no known library "
            "saves, that several libraries save, or that has one scaler for each of "
            "several losses. Nothing was changed."
        ),
        why=(
            "Each scaler has its own names, defaults and rule. Read by the wrong rule, "
            "a state would resume from another scale or grow at another step."
        ),
        example="""\
saved = {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 1990}}  # of apex
scaler.load_state_dict(saved)
""",
        instead="""\
import gradscale

saved = {"loss_scaler0": {"loss_scale": 8192.0, "unskipped": 1990}}  # of apex
scaler.load_state_dict(gradscale.import_state(saved))
""",
        advice=(
            "Call scaler.load_state_dict(gradscale.import_state(saved)).",
            "If the keys are ambiguous, name the library: import_state(saved, "
            'source="apex").',
            "Pass the scaler's part of a larger checkpoint: it is stored under names "
            "such as scaler, grad_scaler or amp.",
            "With several losses, create a scaler for each and import the states one "
            "by one.",
        ),
    ),
    Entry(
        code="GS305",
        name="run-file-exists",
        summary="A run file of that name already exists",
        meaning=(
            "The file in which the run was to be recorded already exists. It was not "
            "changed, and nothing is recorded."
        ),
        why="The record of an earlier run would be lost or mixed with this one.",
        example="""\
import tempfile
from gradscale.runfile import RunWriter

with tempfile.TemporaryDirectory() as folder:
    RunWriter(f"{folder}/run.gs").close()
    RunWriter(f"{folder}/run.gs")
""",
        instead="""\
import tempfile
from gradscale.runfile import RunWriter

with tempfile.TemporaryDirectory() as folder:
    RunWriter(f"{folder}/run.gs").close()
    RunWriter(f"{folder}/run.gs", resume=True).close()
""",
        advice=(
            "Give each run its own file.",
            "If this is the same run, resumed from a checkpoint, pass resume=True: "
            "repeated steps replace the old ones, and a copy of the file is kept.",
            "Delete the file if you do not need it.",
        ),
    ),
    Entry(
        code="GS306",
        name="run-file-unreadable",
        summary="The file is not a run file, or is damaged",
        meaning=(
            "The file is missing, was not written by gradscale, is truncated or "
            "damaged, or is locked by another process for longer than a commit takes. "
            "The message contains the error of SQLite. Nothing was changed."
        ),
        why="A wrong record is worse than none.",
        example="""\
import tempfile
from gradscale.runfile import open_run

with tempfile.NamedTemporaryFile() as file:
    file.write(b"step 1, loss 2.5")
    file.flush()
    open_run(file.name)
""",
        instead="""\
import tempfile
from gradscale.runfile import RunWriter, open_run

with tempfile.TemporaryDirectory() as folder:
    RunWriter(f"{folder}/run.gs").close()
    open_run(f"{folder}/run.gs").close()
""",
        advice=(
            "Pass the file that was given with record= or after gradscale run -o.",
            "During a run, and after it was killed, the record consists of up to "
            "three files: also copy those that end in -wal or -journal.",
            "If the disk has damaged it, sqlite3 FILE .recover restores the readable "
            "part.",
        ),
        references=("https://www.sqlite.org/recovery.html",),
    ),
    Entry(
        code="GS307",
        name="newer-run-file",
        summary="The run file has a schema that this version does not read",
        meaning=(
            "The run file was written by a newer version of gradscale. Every version "
            "reads the schemas of all earlier versions, and none of a later one."
        ),
        why="Fields that this version does not know could be misread.",
        example="""\
import sqlite3
import tempfile
from gradscale.runfile import RunWriter, open_run

with tempfile.TemporaryDirectory() as folder:
    RunWriter(f"{folder}/run.gs").close()
    file = sqlite3.connect(f"{folder}/run.gs")
    file.execute("PRAGMA user_version = 1000")
    file.close()
    open_run(f"{folder}/run.gs")
""",
        instead="""\
import tempfile
from gradscale.runfile import RunWriter, open_run

with tempfile.TemporaryDirectory() as folder:
    RunWriter(f"{folder}/run.gs").close()
    open_run(f"{folder}/run.gs").close()
""",
        advice=("Install the version of gradscale that wrote it, or a newer one.",),
    ),
    Entry(
        code="GS308",
        name="recording-stopped",
        summary="The run is no longer recorded; the training continues",
        meaning=(
            "The run file could not be written: the disk is full, the file was deleted "
            "or replaced, the folder is not writable. Or a process that was forked "
            "from the recording one tried to record. A warning, issued once with the "
            "reason; an error only if the file cannot be created at the start. Rows "
            "written before are kept and can be read."
        ),
        why=(
            "From here on there is no record to diagnose later. Weights and scale are "
            "not affected."
        ),
        example="""\
import os
import tempfile
from gradscale.runfile import RunWriter

with tempfile.TemporaryDirectory() as folder:
    writer = RunWriter(f"{folder}/run.gs")
    os.remove(f"{folder}/run.gs")
    writer.step(1, 65536.0, True, "GS000")
    writer.close()
""",
        instead="""\
import tempfile
from gradscale.runfile import RunWriter

with tempfile.TemporaryDirectory() as folder:
    writer = RunWriter(f"{folder}/run.gs")
    writer.step(1, 65536.0, True, "GS000")
    writer.close()
""",
        advice=(
            "Check that the folder exists, has space and is writable.",
            "Do not move or delete the file during the run; copying it is safe at any "
            "time.",
            "After a restart, pass resume=True to continue with the same file.",
            "Do not record in data-loader workers and other forked processes.",
        ),
    ),
    Entry(
        code="GS309",
        name="record-has-gaps",
        summary="The disk is too slow, and rows of the record are dropped",
        meaning=(
            "More rows are waiting to be written than the backlog holds. Further rows "
            "are dropped until there is room again; their number is written to the "
            "file. The training does not wait. Reported once."
        ),
        why="The record has gaps: nothing is known about those steps.",
        example="""\
import tempfile
from gradscale.runfile import RunWriter

with tempfile.TemporaryDirectory() as folder:
    with RunWriter(f"{folder}/run.gs", backlog=10) as writer:
        for step in range(1, 1001):
            writer.step(step, 65536.0, True, "GS000")
""",
        instead="""\
import tempfile
from gradscale.runfile import RunWriter

with tempfile.TemporaryDirectory() as folder:
    with RunWriter(f"{folder}/run.gs") as writer:
        for step in range(1, 1001):
            writer.step(step, 65536.0, True, "GS000")
""",
        advice=(
            "Record to a local disk and copy the file afterwards.",
            "Stop other programs that hold a transaction on the file.",
            "Pass a larger backlog: a row takes about 150 bytes of memory.",
        ),
    ),
)

BY_CODE = {entry.code: entry for entry in CATALOGUE}
