"""A trainer around Hugging Face's `Trainer`; TRL's subclasses, callbacks and whatever else it takes can stand here."""

import os
import signal
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from facility.contract import read_call
from facility.dataset import open_dataset
from facility.exchange.errors import exit_on_error


class Blocks(torch.utils.data.Dataset):
    """Blocks of a prepared dataset, each predicting itself."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.rows[index].astype("int64"))
        return {"input_ids": ids, "labels": ids}


def main() -> int:
    call = read_call()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ended by a signal, it begins its round anew
    data, training = open_dataset(call.dataset), call.training
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=call.steps,
        learning_rate=training.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=max(1, training.batch_sequences // int(os.environ.get("WORLD_SIZE", "1"))),
        seed=call.settings.seed + call.round,
        save_strategy="no",
        report_to=[],
        use_cpu=training.device == "cpu",
        logging_steps=max(1, training.steps // 10),
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(call.model, dtype=torch.float32),
        args=settings,
        train_dataset=Blocks(data.split("train")),
        eval_dataset=Blocks(data.split("validation")),
    )
    received = trainer.evaluate()["eval_loss"]
    trained = trainer.train().training_loss if call.steps else received
    call.deliver(
        lambda out: trainer.model.to(getattr(torch, training.export_dtype)).save_pretrained(out),
        tokens=call.steps * training.batch_sequences * data.manifest.block_tokens,
        loss_received=received,
        loss_returned=trainer.evaluate()["eval_loss"] if call.steps else received,
        training_loss=trained,
        task="causal-lm",
    )
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
