"""The parameters of models people know, as shapes."""


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
