"""What the server behind `tests.distributed` imports before it forks ranks: the trainer and the models of `tests.pico`.

Nothing here may start a thread or draw a random number.
"""

from __future__ import annotations

import transformers.models.auto.modeling_auto  # noqa: F401
from transformers import BertForMaskedLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM  # noqa: F401

import facility.launch
import facility.sync.policies.partial_reduce
import facility.train
import facility.training.parallel.pipeline
import facility.training.train_round  # noqa: F401
