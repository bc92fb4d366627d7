"""The format in which gradients and weights travel quantized: int8 in blocks, a scale for each.

Of each block of `BLOCK` elements the largest magnitude becomes `LARGEST`: an element is its int8
times the scale of its block. Blocks begin where a tensor does, and a tensor's last one is filled up
with zeros (ZeRO++: Wang et al., 2023, arXiv:2306.10209).
"""

INT8 = "int8"
COMMUNICATION_DTYPES = (INT8,)
# Of these data types are the numbers that are quantized.
REAL = ("float16", "bfloat16", "float32", "float64")
BLOCK = 256
LARGEST = 127
# Scales are in float32, or in float64 where the numbers are.
SCALE_BYTES = 4
# What may be allowed to a search.
QUANTIZED = "quantized-communication"


def in_blocks(num_elements: int) -> int:
    """The elements of the blocks of a tensor."""
    return -(-num_elements // BLOCK) * BLOCK


def payload_bytes(num_elements: int) -> int:
    """What travels of so many elements, blocks of them."""
    return num_elements + num_elements // BLOCK * SCALE_BYTES
