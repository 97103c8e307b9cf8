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
# What every example takes for granted.
GIVEN = (
    "model, optimizer, batch and batches are there; scaler is "
    'gradscale.torch.GradScaler("cuda", model=model); loss_of(batch) runs the model '
    "under float16 autocast and returns the loss."
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One code: what it means and what to do about it.

    Attributes:
        code: GS and three digits; the first digit is the section.
        name: The code in words, in kebab case.
        summary: One sentence without a full stop.
        meaning: What it means.
        why: Why it is bad, or why it is not.
        example: Python that leads to it.
        instead: Python that does the same and does not lead to it; empty if no other
            code would help.
        advice: What to do, in the order in which to try.
        references: Addresses of pages that tell more.
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
            "one was asked for."
        ),
        why="It is not. This is what nearly every step of a healthy run looks like.",
        example="""\
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
print(scaler.last.verdict)  # ok
""",
        advice=("Nothing.",),
    ),
    Entry(
        code="GS001",
        name="calibrated",
        summary="The scale has found its place",
        meaning=(
            "The run started with a scale that was too high, skipped a few steps while "
            "it came down, and has been finite for ten steps in a row since. The line "
            "says from where to where, and how many batches it took."
        ),
        why=(
            "It is not. Each halving costs one batch, once. This is the only line that "
            "a healthy run prints."
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
            "Nothing.",
            "To save the batches, start the next run from the scale at which this one "
            "arrived: init_scale.",
        ),
    ),
    Entry(
        code="GS002",
        name="calibrating",
        summary="The scale started too high and is coming down",
        meaning=(
            "No step has been finite yet. Each step that is not finite is skipped and "
            "backs the scale off, until the first one fits. This is how the scale "
            "finds its place at the start of a run."
        ),
        why=(
            "It is not, as long as it ends. Each halving costs one batch: from 2^16 "
            "usually none to a few, from 2^32 about sixteen more. The weights are "
            "untouched."
        ),
        example="""\
scaler = GradScaler("cuda", init_scale=2.0**32)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    print(scaler.last)  # calibrating, calibrating, ..., ok
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
            "If the skips at the start bother you, pass a lower init_scale; "
            "get_scale() at the end of an earlier run is a good one.",
            "If forty steps pass without an applied one, the scale is not the cause. "
            "Look at scaler.last.culprits; GS202 is what comes next.",
        ),
    ),
    Entry(
        code="GS003",
        name="probing",
        summary="The scale was raised one step ago and turned out too high",
        meaning=(
            "After growth_interval finite steps in a row the scale is raised to see "
            "whether more of the float16 range can be used. Here it could not: this "
            "step is skipped and the scale backs off again."
        ),
        why=(
            "It is not. It costs one batch in growth_interval, one in 2000 by default, "
            "and keeps the scale as high as the gradients allow."
        ),
        example="""\
scaler = GradScaler("cuda", growth_interval=1)
for batch in batches:
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    print(scaler.last)  # ok, ok, ..., probing
""",
        advice=(
            "Nothing.",
            "If steps are dear, as with very large batches, pass a longer "
            "growth_interval, or keep a scale that is known to fit with StaticScale.",
        ),
    ),
    Entry(
        code="GS101",
        name="setting-cannot-work",
        summary="A setting or an argument can never work",
        meaning=(
            "A value was refused when it was given: a factor that moves the scale the "
            "wrong way, bounds that exclude each other, a scale that is no usable "
            "float32, two sets of settings at once. The message names the argument and "
            "its value."
        ),
        why=(
            "Taken as it is, the scale would stand still, reach 0 or infinity, or "
            "leave its bounds, many steps later and without a word."
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
            "When in doubt leave it out: the defaults are those of "
            "torch.amp.GradScaler.",
            "To use a scale beyond the bounds, move the bounds: "
            "policy=DynamicScale(init_scale=..., min_scale=..., max_scale=...).",
        ),
    ),
    Entry(
        code="GS102",
        name="call-order",
        summary="A method was called at a moment when it cannot be right",
        meaning=(
            "One iteration is scale, backward, unscale_ if the gradients are needed "
            "unscaled, step, update. Each optimizer is unscaled and stepped at most "
            "once between two updates. Torch's words for this are kept: \"unscale_() "
            'has already been called on this optimizer since the last update()", "No '
            'inf checks were recorded prior to update", and others.'
        ),
        why=(
            "Gradients would be divided by the scale twice or not at all, or be "
            "applied twice. The training would go on and the result would be wrong."
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
            "Bring the calls into the order above; update() comes last, once for all "
            "optimizers.",
            "To clip, call scaler.clip_grad_norm_(optimizer, max_norm): it is right "
            "before and after unscale_.",
            "When an iteration is abandoned half-way, by an exception or a continue, "
            "call scaler.reset().",
        ),
        references=(_AMP_EXAMPLES,),
    ),
    Entry(
        code="GS103",
        name="no-gradients",
        summary="No parameter of an optimizer has a gradient",
        meaning=(
            "step() found nothing to do: every .grad of the optimizer is None. The "
            'step is left out and the scale stays. Where torch raises "No inf checks '
            'were recorded prior to update", this is a warning, once for each '
            "optimizer."
        ),
        why=(
            "In a branch that is not used in this iteration, it is not. In every "
            "iteration, it means that nothing is learned: the parameters are frozen, "
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
            "Make the optimizer after the model has been moved, wrapped or replaced.",
            "With several optimizers, call step() only for those whose loss was used.",
        ),
    ),
    Entry(
        code="GS104",
        name="backward-after-unscale",
        summary="backward() added to gradients that were unscaled or clipped already",
        meaning=(
            "The gradients of an optimizer had been unscaled or clipped in this "
            "iteration when another backward pass added to them. A warning; an error "
            'with guard="raise".'
        ),
        why=(
            "The sum is neither scaled nor unscaled, neither clipped nor whole. With a "
            "scale of 2^16 the second part weighs 65536 times too much, and the step "
            "is wrong."
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
            "If the two passes belong to two iterations, call update() and zero_grad() "
            "between them.",
        ),
        references=(_AMP_EXAMPLES,),
    ),
    Entry(
        code="GS105",
        name="fp16-gradients",
        summary="The gradients to be unscaled are float16",
        meaning=(
            "Trainable parameters are float16, so their gradients are too. This is "
            'torch\'s "Attempting to unscale FP16 gradients.", with the parameters '
            "named. The usual way to get here is a checkpoint loaded in float16 and "
            "then trained, whole or with LoRA."
        ),
        why=(
            "Divided by the scale, small float16 gradients become 0: what the scale "
            "has saved is lost. And a float16 weight does not change when the update "
            "is smaller than about a thousandth of it."
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
            "Keep the trainable parameters in float32 and compute under "
            "torch.autocast. Frozen parameters may stay in float16.",
            "Cast before the optimizer is made if it keeps copies of the weights.",
            "An optimizer of gradscale.torch.optim, or a fused one of torch's, "
            "unscales in its step, in float32: leave unscale_() out, and clip by "
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
        summary="A gradient cannot be read or unscaled without a wrong result",
        meaning=(
            "A gradient has a dtype, a layout or a class that cannot be multiplied in "
            "place, overlaps another one's memory, or was unscaled with one optimizer "
            "and changed before another one took it. The message names the parameter."
        ),
        why="Unscaled anyway, some elements would be divided twice or not at all.",
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
            "Give each parameter to one optimizer, and each parameter a dense gradient "
            "of its own in float16, bfloat16, float32, float64 or a complex type.",
        ),
    ),
    Entry(
        code="GS107",
        name="device-not-usable",
        summary="The device is missing here or is not a device",
        meaning=(
            "Either the first argument of GradScaler is not the name of a device, for "
            "example a number in the place where older scalers took init_scale: an "
            "error. Or the device exists and this machine has none: a warning, and the "
            "scaler turns itself off; a command that was told to use the device stops. "
            "Without CUDA the warning has torch's words: "
            '"torch.cuda.amp.GradScaler is enabled, but CUDA is not available. '
            'Disabling."'
        ),
        why=(
            "A scaler that is off neither scales nor checks. Float16 gradients "
            "underflow, and steps that are not finite reach the weights."
        ),
        example="""\
scaler = GradScaler(1024.0)
""",
        instead="""\
scaler = GradScaler("cuda", init_scale=1024.0)
""",
        advice=(
            "Name the device first: GradScaler('cuda', init_scale=...). The older "
            "signature is gradscale.torch.cuda.amp.GradScaler(1024.0).",
            "To scale on the CPU pass 'cpu'.",
            "To train without scaling on purpose pass enabled=False, and the warning "
            "is gone.",
        ),
    ),
    Entry(
        code="GS108",
        name="closure",
        summary="step() was given a closure",
        meaning=(
            "Some optimizers, such as LBFGS, call a closure that runs forward and "
            'backward again inside step(). Torch says "Closure use is not currently '
            'supported if GradScaler is enabled."'
        ),
        why=(
            "The backward pass inside the closure would make gradients that are "
            "scaled, after those of this step were checked and unscaled."
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
def closure():
    optimizer.zero_grad()
    loss = loss_of(batch)
    scaler.scale(loss).backward()
    return loss


closure()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Run the closure yourself, once, and leave it out of step().",
            "An optimizer that needs several evaluations a step is better trained in "
            "bfloat16 or float32, where no scaler is needed.",
        ),
    ),
    Entry(
        code="GS109",
        name="scale-tensor-ignored",
        summary="A scale given to update() as a tensor was out of bounds and ignored",
        meaning=(
            "update(new_scale) got a tensor on an accelerator. It is compared with the "
            "bounds on the device, without waiting for it; it was outside, so the "
            "scale stayed. The warning comes up to five updates later, when the row of "
            "the step has reached the host. A number, or a tensor on the CPU, is "
            "refused at once (GS101)."
        ),
        why=(
            "The run goes on with another scale than the one you asked for. Taken as "
            "it was, a scale of 0, NaN or infinity would have ruined every gradient."
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
            "Find out why the scale you compute leaves the bounds; a NaN does too.",
            "If the scale is meant, widen the bounds: "
            "policy=DynamicScale(min_scale=..., max_scale=...).",
        ),
    ),
    Entry(
        code="GS110",
        name="triton-failed",
        summary="Triton could not build or start a kernel; plain PyTorch is used",
        meaning=(
            "On a GPU the scaler and its optimizers run Triton kernels. Triton "
            "compiles them when they are first used, for which it needs a C compiler, "
            "a driver that fits and a GPU that it knows. One of these failed; the "
            "message gives Triton's own words. From here on plain PyTorch operations "
            "do the work. Nothing was lost: a kernel that does not start has written "
            "nothing."
        ),
        why=(
            "The results are the same to rounding, but a step takes longer: the "
            "gradients are read more than once, and each operation is launched on its "
            "own."
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
            "Install what the message asks for, mostly a C compiler such as gcc.",
            "Install the Triton that belongs to your PyTorch: pip show torch lists it.",
            "Pass kernels='triton' to have the failure raised where it happens.",
            "Pass kernels='plain' to do without Triton and without this warning.",
        ),
    ),
    Entry(
        code="GS111",
        name="ranks-apart",
        summary="The ranks do not stand at the same place",
        meaning=(
            "Ranks that hold parts of the same gradients decide together: in every "
            "step each tells the others what it has read, and where it stands. They "
            "told different things: another policy, another number of updates, another "
            "call; or one of them found gradients that it cannot use. Or the group in "
            "which to decide cannot be told from the parameters."
        ),
        why=(
            "A rank that decides by other rules gets another scale, steps where the "
            "others skip, and ends up with weights of its own, without a word. One "
            "that is a call behind makes the others wait for ever."
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
            "on one that has no gradients in this iteration.",
            "If a rank stopped by itself, its own error says why.",
            "Pass process_group= where the parameters lie on meshes that have no group "
            "in common.",
        ),
    ),
    Entry(
        code="GS201",
        name="overflow",
        summary="A gradient was not finite; the step was skipped",
        meaning=(
            "Steps had been finite before, the loss is finite, and the scale was not "
            "raised just now: this batch made a gradient that does not fit. The step "
            "is skipped, the scale backs off, the weights are as they were."
        ),
        why=(
            "Now and then it is not: a batch with large gradients is a batch lost. If "
            "it happens every few steps, batches are lost for nothing, and if the "
            "scale falls and falls, something else is wrong and GS202 is on its way."
        ),
        example="""\
for batch in (batch, batch, 100.0 * batch):
    optimizer.zero_grad()
    scaler.scale(loss_of(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
print(scaler.last, scaler.last.culprits)  # overflow
""",
        advice=(
            "One skip now and then: nothing. Let schedulers follow the steps that were "
            "applied: if scaler.last.applied: scheduler.step().",
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
            "in a row were not finite there. ScaleCollapsed is raised. Every bad step "
            "was skipped: the weights are those of the last good step. Torch would go "
            "on to a scale of 0."
        ),
        why=(
            "No scale can help: at the floor the gradients are smaller than without "
            "scaling. A loss, an input or a weight is not finite, or the model itself "
            "does not fit into float16."
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
            "Read in the message whether the loss was finite. If not, see GS203.",
            "Are the weights finite? "
            "all(p.isfinite().all() for p in model.parameters()). If not, they were so "
            "before the scaler saw them: load an earlier checkpoint.",
            "Is the batch finite, labels and masks included?",
            "Loss, weights and batch are finite: the backward pass overflows by "
            "itself. Run the module of the first culprit under torch.autocast(device, "
            "enabled=False), or train in bfloat16.",
            'guard="raise" holds the scale while the loss is not finite, so that the '
            "run is still in place when the cause is mended.",
        ),
    ),
    Entry(
        code="GS203",
        name="loss-not-finite",
        summary="The loss was not finite before it was scaled",
        meaning=(
            "The forward pass gave a loss of NaN or infinity. The step is skipped. By "
            "default the scale then backs off as torch's does, although that cannot "
            'help; with guard="raise" it is held.'
        ),
        why=(
            "The scale is not to blame and no scale can mend it. The weights are "
            "untouched, but the forward pass has run: the running statistics of "
            "BatchNorm may hold values that are not finite from now on."
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
            "Look for what float16 cannot hold: log and division near 0, an epsilon "
            "below 6e-8, 1 - 1e-6 (which is 1), masks of -65504 with something added, "
            "activations above 65504.",
            "Use the fused functions that take logits, or compute the loss in float32.",
            "If it came after a bad batch, check running_mean and running_var of "
            "BatchNorm layers, or load a checkpoint.",
        ),
    ),
    Entry(
        code="GS204",
        name="norm-overflow",
        summary="Every gradient is finite and their norm is not a usable float32",
        meaning=(
            "clip_grad_norm_() was asked for, every element is finite, but the norm of "
            "the unscaled gradients is above 3.4e38, or the factor that would clip "
            "them is below the smallest normal float32. The step is skipped and the "
            "scale backs off."
        ),
        why=(
            "Clipped by such a norm, every gradient would become 0 or lose its digits, "
            "and the step would be taken as if all were well. Gradients of this size "
            "are no rounding matter: the training has diverged."
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
            "missing warm-up, a sum where a mean was meant.",
            "If max_norm is tiny, below 1e-30 or so, pass one that gradients can have.",
        ),
    ),
    Entry(
        code="GS205",
        name="static-scale-skipped",
        summary="A step was skipped at a scale that cannot back off",
        meaning=(
            "The policy is StaticScale or NoScale and a gradient was not finite. The "
            "step was skipped. Reported once, up to five updates later; all skips are "
            "counted in scaler.skipped_steps."
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
        summary="The loss was finite and left its dtype when it was scaled",
        meaning=(
            "The loss is float16, and loss times scale is above 65504: a loss of 3.5 "
            "fits at 2^14 and not at 2^15. The product is infinite before backward "
            "begins, and every gradient with it. The step is skipped and the scale "
            "backs off."
        ),
        why=(
            "The loss, one number, decides how high the scale may be, where the "
            "gradients would allow more. Gradients that need the higher scale "
            "underflow."
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
            "Compute the loss in float32: scaler.scale(loss.float()).",
            "Inside torch.autocast most losses of PyTorch give float32 by themselves; "
            "look for a half() or to(torch.float16) after them.",
        ),
    ),
    Entry(
        code="GS207",
        name="weights-not-finite",
        summary="A weight is NaN or infinite",
        meaning=(
            "A parameter of the model is not finite. Loss and gradients follow it, at "
            "every scale and for every batch."
        ),
        why=(
            "Nothing that is computed from here on is worth anything, and no scale "
            "brings the weight back. The scaler skips every step whose gradients are "
            "not finite, so the weight was written by something else."
        ),
        example="""\
with torch.no_grad():
    model.weight[0, 0] = float("inf")
scaler.scale(loss_of(batch)).backward()
scaler.step(optimizer)
scaler.update()
""",
        advice=(
            "Load a checkpoint from before the step that the message names.",
            "Look for optimizer.step() without the scaler, a learning rate that is not "
            "finite, weights kept in float16, and a first checkpoint that was bad "
            "already.",
        ),
    ),
    Entry(
        code="GS208",
        name="not-finite-at-any-scale",
        summary="Gradients are not finite however far the scale falls",
        meaning=(
            "The loss is finite, the gradients are not, and a scale 2^8 times lower "
            "(2^10, if there was no NaN) has not changed that, step after step. Before "
            "any step has fitted, the scale must have come down to 2^-8 as well, and "
            "NaN must not have turned into infinity on the way."
        ),
        why=(
            "An overflow that the scale makes goes away when the scale falls. This one "
            "did not: the backward pass itself gives NaN or infinity. No step will be "
            "taken until that is mended."
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
            "NaN: look for a root, a norm, a power or a division at 0 and for masks of "
            "infinity. Keep the argument away from 0 before the operation.",
            "Infinity only: run the module of the first culprit under "
            "torch.autocast(device, enabled=False), or train in bfloat16.",
            "Few tensors of many: the module of scaler.last.culprits[0]. All of them: "
            "the loss function or the last layers.",
        ),
    ),
    Entry(
        code="GS209",
        name="underflow",
        summary="The scale is so low that gradients vanish",
        meaning=(
            "A fifth of the gradient elements or more, in two samples, were too small "
            "for float16 at this scale; or for a hundred steps not one gradient was as "
            "large as 2^-14, the smallest normal float16."
        ),
        why=(
            "What is below 2^-24 is 0 in float16. The steps are taken and look well, "
            "but most of what the batch says is lost: the loss flattens early."
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
            "With headroom left, raise the scale to the one that the message names, or "
            "let DynamicScale find it.",
            "With no headroom left, the gradients span more than float16 holds: train "
            "in bfloat16, or keep the layers with the largest gradients in float32.",
            "If the scale had fallen before, look for what made it fall: GS210, GS201.",
        ),
        references=("https://arxiv.org/abs/1710.03740",),
    ),
    Entry(
        code="GS210",
        name="scale-falling",
        summary="The scale or the headroom is on its way down",
        meaning=(
            "The scale is several backoffs below its mean over the last 5000 steps, "
            "further than the saw-tooth of growth and backoff has taken it so far; or "
            "gradients have grown to sixteen times their usual size and float16 is "
            "nearly full. Said once, and again if the fall is twice as deep."
        ),
        why=(
            "The run is still well, and may stay so. But large runs that were lost had "
            "this first: GLM-130B tens of steps, BigScience 104B more than a thousand "
            "steps before the loss rose."
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
            "rise: go back to it with a lower learning rate or a tighter clip.",
            "If the culprits are few, watch their module or run it in float32.",
        ),
        references=(
            "https://github.com/THUDM/GLM-130B/blob/main/logs/main-log-en.md",
            "https://github.com/bigscience-workshop/bigscience/blob/master/train/"
            "tr8-104B-wide/chronicles.md",
        ),
    ),
    Entry(
        code="GS301",
        name="resumed-without-state",
        summary="The optimizer has steps behind it and the scaler starts anew",
        meaning=(
            "At the scaler's first step, the optimizer already had a state: the run "
            "was resumed, and the scaler's state was not saved or not loaded. Or the "
            "optimizer was trained without a scaler so far; then all is well. Said "
            "once, and only where the optimizer keeps a state to tell it by."
        ),
        why=(
            "The scale starts from init_scale and the count of finite steps from 0. "
            "The first steps may be skipped until the scale is found again, or small "
            "gradients underflow until it has grown back, and the run goes on "
            "differently from one that was not stopped."
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
            "Save scaler.state_dict() after update(), beside model and optimizer, and "
            "call scaler.load_state_dict() before the first step.",
            "A state of apex, DeepSpeed, Megatron-Core or fairseq: "
            "scaler.load_state_dict(gradscale.import_state(saved)).",
            "If the state is lost, go on: the scale finds its place within a few steps "
            "(GS002). An init_scale near the last one known makes it fewer.",
            "If the optimizer was trained without a scaler so far, there is nothing to "
            "do.",
        ),
    ),
    Entry(
        code="GS302",
        name="bad-checkpoint",
        summary="A checkpoint cannot be loaded",
        meaning=(
            "load_state_dict() got a dict that is empty, lacks a key, or holds a value "
            "that cannot be gone on with, such as a scale of 0 or NaN; or the state "
            "of an optimizer has an entry that does not fit its parameter. The message "
            "names the key and the value. Nothing was changed."
        ),
        why=(
            "A resumed run would start from another state than the one that was saved: "
            "steps skipped again, or gradients that are not finite from the first step."
        ),
        example="""\
scaler.load_state_dict({"scale": 65536.0})
""",
        instead="""\
saved = scaler.state_dict()  # after update(), beside model and optimizer
scaler.load_state_dict(saved)
""",
        advice=(
            "Save the whole scaler.state_dict(), not only the scale.",
            "A disabled scaler saves an empty dict: save from an enabled one.",
            "A scale outside the bounds of the policy: widen them with "
            "policy=DynamicScale(min_scale=..., max_scale=...) before loading.",
            "If the checkpoint is lost, start without it: the scale finds its place "
            "within a few steps (GS002).",
        ),
    ),
    Entry(
        code="GS303",
        name="newer-checkpoint",
        summary="The checkpoint has a format that this version does not read",
        meaning=(
            "The checkpoint was written by a newer version of gradscale. Every version "
            "reads the formats of all earlier ones, and none of a later one. Nothing "
            "was changed."
        ),
        why=(
            "Fields that this version does not know would be dropped without a word, "
            "and the resumed run would differ from the one that was saved."
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
        summary="A state of another scaler has to be imported",
        meaning=(
            "load_state_dict() got the state of apex, DeepSpeed, Megatron-Core, "
            "fairseq, flax or jmp; or import_state() got a value that nobody is known "
            "to save, that several may have saved, or that has a scaler for each of "
            "several losses. Nothing was changed."
        ),
        why=(
            "Each scaler has its own names, defaults and rule. Read as another's, a "
            "state would go on from another scale or grow at another step."
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
            "scaler.load_state_dict(gradscale.import_state(saved)).",
            "If the keys do not tell who saved it, say so: import_state(saved, source="
            '"apex").',
            "Pass the scaler's own part of a larger checkpoint: it lies under names "
            "such as scaler, grad_scaler or amp.",
            "With several losses, make a scaler for each and import them one by one.",
        ),
    ),
    Entry(
        code="GS305",
        name="run-file-exists",
        summary="There is a run file of that name already",
        meaning=(
            "A run was to be recorded in a file that is there. It was not touched, and "
            "nothing is recorded."
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
            "Give each run a file of its own.",
            "If this is the same run, resumed from a checkpoint, pass resume=True: "
            "steps that are taken again replace the old ones.",
            "Delete the file if you do not need it.",
        ),
    ),
    Entry(
        code="GS306",
        name="run-file-unreadable",
        summary="The file is not a run file, or is damaged",
        meaning=(
            "The file is missing, was not written by gradscale, is cut short or "
            "damaged, or is held by another process for longer than a commit takes. "
            "The message has SQLite's words. Nothing was changed."
        ),
        why="A record that is wrong is worse than none.",
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
            "While a run goes on, and after it was killed, the file consists of up to "
            "three: copy those that end in -wal or -journal as well.",
            "If the disk has damaged it, sqlite3 FILE .recover saves what is left.",
        ),
        references=("https://www.sqlite.org/recovery.html",),
    ),
    Entry(
        code="GS307",
        name="newer-run-file",
        summary="The run file has a schema that this version does not read",
        meaning=(
            "The run file was written by a newer version of gradscale. Every version "
            "reads the schemas of all earlier ones, and none of a later one."
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
        summary="The run is no longer recorded; the training goes on",
        meaning=(
            "The run file could not be written: the disk is full, the file was deleted "
            "or replaced, the folder may not be written to. Or a process that was "
            "forked from the one that records tried to record. A warning, said once "
            "with the reason; an error only if the file cannot be made at the start. "
            "What was written before is kept and can be read."
        ),
        why=(
            "From here on there is no record, so nothing can be said later about what "
            "happened. Weights and scale are not affected."
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
            "See that the folder exists, has space and may be written to.",
            "Do not move or delete the file while the run goes on; a copy can be "
            "taken at any time.",
            "After a restart, pass resume=True to go on with the same file.",
            "In data-loader workers and other forked processes, do not record.",
        ),
    ),
    Entry(
        code="GS309",
        name="record-has-gaps",
        summary="The disk does not keep up, and rows of the record are dropped",
        meaning=(
            "More rows wait to be written than the backlog holds. Further ones are "
            "dropped until there is room again; how many is written into the file. "
            "The training does not wait. Said once."
        ),
        why="The record has gaps: what happened in those steps is not known.",
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
            "End other programs that hold the file in a transaction of their own.",
            "Pass a larger backlog: a row takes about 150 bytes of memory.",
        ),
    ),
)

BY_CODE = {entry.code: entry for entry in CATALOGUE}
