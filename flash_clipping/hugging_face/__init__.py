"""What models of ``transformers`` and PEFT have that PyTorch's layers have not: experts in one
parameter, on one process or several, images of any size, losses of their own, and layers that a
``tp_plan`` has cut, or that multiply in fewer bits."""

from flash_clipping.engine import wings
from flash_clipping.hugging_face import experts, image_patches, peft_experts  # noqa: F401
from flash_clipping.hugging_face.experts_in_parallel import distribute_experts as distribute_experts
from flash_clipping.hugging_face.losses import ModelLosses
from flash_clipping.hugging_face.quantized import refuse_mean, refuse_rounding, rounds_by_scale
from flash_clipping.hugging_face.tensor_plan import lay_out_by_hooks

wings.own_losses = ModelLosses
wings.lay_out_by_hooks = lay_out_by_hooks
wings.refuse_rounding = refuse_rounding
wings.rounds_by_scale = rounds_by_scale
wings.refuse_mean = refuse_mean
