"""Ways to run a wrapped model that are refused: what they leave would be wrong, or missing."""

from __future__ import annotations

from typing import NoReturn

from torch.cuda import is_current_stream_capturing

from flash_clipping.errors import FlashClippingError


def refuse_compiled_autograd() -> NoReturn:
    """Refuse a backward that Dynamo traces: nothing would be recorded, and norms would be old."""
    raise FlashClippingError(
        "the model: compiled autograd is on (torch._dynamo.compiled_autograd, or "
        "torch._dynamo.config.compiled_autograd = True with a compiled training step). It "
        "replaces autograd's engine, in which flash clipping records and clips. Switch it off; "
        "compile the model alone, wrapped.compile(), and call forward, loss and backward() "
        "outside of torch.compile."
    )


def refuse_graph_capture() -> None:
    """Refuse a backward pass that is captured as a CUDA graph, but not by ``GraphedStep``."""
    if is_current_stream_capturing():
        raise FlashClippingError(
            "A backward pass of flash clipping is being captured as a CUDA graph. A replay "
            "would read tables that are gone by then, and leave no norms: capture the step "
            "with flash_clipping.GraphedStep, which is given the wrapped model (or what holds "
            "the hooks), or run it outside torch.cuda.graph."
        )


def refuse_threads(found: str, running: str) -> NoReturn:
    """Refuse that a second thread calls one model's forward or backward."""
    raise FlashClippingError(
        f"Two threads use one wrapped model at the same time: {found} was called while another "
        f"thread's {running} runs (or failed, with its exception still held). Their samples would "
        "be mixed up. Use the model in one thread at a time: hold a lock from forward to the end "
        "of backward, or give each thread a copy of the model."
    )
