"""What processes of these tests begin with (``tests/support/starting.py``)."""

import accelerate
import opacus
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers

import flash_clipping

__all__ = ["accelerate", "flash_clipping", "opacus", "torch", "transformers"]
