"""Models as short assemblies of poise.nn, their checkpoints, and generation."""

from poise.models.bert import Bert
from poise.models.extend import extend
from poise.models.gpt import GPT
from poise.models.llama import Llama
from poise.models.loading import load, save, tokenizer
from poise.models.long import BigBirdModel, LongformerModel
from poise.models.model import CausalModel, Model
from poise.models.t5 import T5

__all__ = [
    "GPT",
    "T5",
    "Bert",
    "BigBirdModel",
    "CausalModel",
    "Llama",
    "LongformerModel",
    "Model",
    "extend",
    "load",
    "save",
    "tokenizer",
]
