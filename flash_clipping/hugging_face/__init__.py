"""What models of ``transformers`` and PEFT have that PyTorch's layers have not: experts in one
parameter, on one process or several, images of any size, and losses of their own."""

from flash_clipping.engine import wings
from flash_clipping.hugging_face import experts, image_patches, peft_experts  # noqa: F401
from flash_clipping.hugging_face.losses import ModelLosses

wings.own_losses = ModelLosses
