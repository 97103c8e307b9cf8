"""Parameter shapes of well-known models."""


def gpt2_shapes(width: int = 768, blocks: int = 12) -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2: by default 124 M parameters in 148 tensors.

    Width 1600 and 48 blocks are GPT-2 XL, 1.56 B parameters in 580 tensors.
    """
    block = [
        (width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
        (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width),
        (width,),
    ]  # fmt: skip
    return [(50257, width), (1024, width), *(block * blocks), (width,), (width,)]


def llama_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of Llama 3.2 1B: 1.24 B parameters in 146 tensors."""
    width, inner, keys = 2048, 8192, 8 * 64
    block = [
        (width,), (width, width), (keys, width), (keys, width), (width, width),
        (width,), (inner, width), (inner, width), (width, inner),
    ]  # fmt: skip
    return [(128256, width), *(block * 16), (width,)]
