"""What is imported before processes are forked (``tests/support/forking.py``)."""

import gc

import accelerate
import opacus
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers

import flash_clipping
from tests.distributed import test_four_processes, test_tensor_parallel_shards, uses
from tests.support.dynamo import measure_no_guards
from tests.support.hugging_face import llama

__all__ = [
    "accelerate",
    "flash_clipping",
    "opacus",
    "test_four_processes",
    "test_tensor_parallel_shards",
    "torch",
    "transformers",
]

measure_no_guards()
torch.set_num_threads(1)  # threads would not be there in forks
uses.adapted(llama())  # imports what a model with adapters needs
# Of what is imported nothing is let go: processes need not look through it, nor copy it for that.
gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 20)
