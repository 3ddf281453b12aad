"""What models of ``transformers`` and PEFT have that PyTorch's layers have not: experts in one
parameter, on one process or several, and images of any size."""

from flash_clipping.hugging_face import experts, image_patches, peft_experts  # noqa: F401
