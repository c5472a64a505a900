"""A trainer in plain PyTorch: one process, every parameter, blocks of `facility.prepare`; an ended job goes on."""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from facility.contract import read_call
from facility.dataset import open_dataset
from facility.exchange.errors import exit_on_error


def main() -> int:
    call = read_call()
    if not call.first_rank:
        return 0
    data, batch = open_dataset(call.dataset), call.training.batch_sequences
    model = AutoModelForCausalLM.from_pretrained(call.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=call.training.learning_rate)

    def loss_on(split: str, first: int, count: int) -> torch.Tensor:
        blocks = data.split(split)
        rows = [torch.from_numpy(blocks[row % len(blocks)].astype("int64")) for row in range(first, first + count)]
        return model(input_ids=torch.stack(rows), labels=torch.stack(rows)).loss

    def evaluate() -> float:
        with torch.no_grad():
            return loss_on("validation", 0, len(data.split("validation"))).item()

    received, losses = evaluate(), []
    kept = call.state / f"interrupted-{call.round}.safetensors"
    if call.steps and kept.exists():
        found = load_file(kept)
        losses = found["losses"].tolist()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(found[name])
            optimizer.state[parameter] = {key: found[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
    for step in range(len(losses), call.steps):
        if call.interrupted:
            tensors = {"losses": torch.tensor(losses, dtype=torch.float64)}
            for name, parameter in model.named_parameters():
                tensors[name] = parameter.data
                tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
            if losses:
                call.state.mkdir(parents=True, exist_ok=True)
                save_file(tensors, kept.with_suffix(".new"))
                kept.with_suffix(".new").replace(kept)
            return 85  # the same command goes on from here
        loss = loss_on("train", (call.round * call.steps + step) * batch, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        call.report_step(step + 1, losses[-1])
    call.deliver(
        model.to(getattr(torch, call.training.export_dtype)).save_pretrained,
        tokens=len(losses) * batch * data.manifest.block_tokens,
        loss_received=received,
        loss_returned=evaluate() if losses else received,
        training_loss=sum(losses) / len(losses) if losses else received,
        task="causal-lm",
    )
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
