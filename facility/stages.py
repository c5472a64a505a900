"""`python -m facility.stages --model DIR --task TASK --tokens N`: can the trainer cut a model into pipeline stages?

Said by the trainer's own look at the model, from its config.json: no weight is read. Exits with 2 and the reason where
it cannot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import exit_on_error
from facility.exchange.logs import add_log_options
from facility.exchange.task_words import TEXT_TASKS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m facility.stages", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face checkpoint")
    parser.add_argument("--task", choices=TEXT_TASKS, default="causal-lm", help="of the dataset (default causal-lm)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a block (default 512)")
    add_log_options(parser)
    arguments = parse_arguments(parser)

    import torch
    import transformers

    from facility.exchange.checkpoints.task_class import FACTORIES
    from facility.training.model import choose_attention, read_config
    from facility.training.parallel.split import inspect_model

    config, factory = read_config(arguments.model), getattr(transformers, FACTORIES[arguments.task])
    attention = choose_attention(config, factory, torch.device("cpu"), torch.float32)
    found = inspect_model(config, factory, attention.name, arguments.tokens)
    print(f"{found.units} units: embedding, {found.count} blocks ({found.blocks}), head")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
