"""Hugging Face's Trainer on a small GPT-2, in FP16 where there is a GPU."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback


class Losses(Trainer):
    """A Trainer that prints its losses bit by bit."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print(loss.item().hex())
        return loss

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if not torch.cuda.is_available():
            # Accelerate refuses FP16 on a CPU; with a scaler it runs the same code.
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)


torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
config = GPT2Config(
    n_layer=2,
    n_head=2,
    n_embd=32,
    vocab_size=64,
    n_positions=32,
    attn_implementation="eager",
)
tokens = torch.randint(0, 64, (160, 32))
data = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        fp16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        max_steps=40,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Losses(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data)
    # It prints the training time, which differs from run to run.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
print(trainer.accelerator.scaler.get_scale())
