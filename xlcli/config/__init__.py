"""The configuration tree: frozen, strict, typed. TOML and dotted overrides in, JSON out. Never imports torch.

`None` means "decide for me"; `train` resolves such fields and saves what it decided in the model's `config.json`.
An illegal combination is refused here, in milliseconds, with the legal choices.
"""

from xlcli.config.attention import ATTENTIONS as ATTENTIONS
from xlcli.config.attention import Attention as Attention
from xlcli.config.attention import FullAttention as FullAttention
from xlcli.config.attention import LinearAttention as LinearAttention
from xlcli.config.attention import LocalAttention as LocalAttention
from xlcli.config.attention import LSHAttention as LSHAttention
from xlcli.config.attention import MixedAttention as MixedAttention
from xlcli.config.model import ModelConfig as ModelConfig
from xlcli.config.model import ReversibleStack as ReversibleStack
from xlcli.config.model import StandardStack as StandardStack
from xlcli.config.model import UniversalStack as UniversalStack
from xlcli.config.position import POSITIONS as POSITIONS
from xlcli.config.runs import Config as Config
from xlcli.config.runs import EvalConfig as EvalConfig
from xlcli.config.runs import GenerateConfig as GenerateConfig
from xlcli.config.runs import Reading as Reading
from xlcli.config.runs import RuntimeConfig as RuntimeConfig
from xlcli.config.runs import SpanKind as SpanKind
from xlcli.config.runs import StreamConfig as StreamConfig
from xlcli.config.runs import TextConfig as TextConfig
from xlcli.config.runs import TokenizerKind as TokenizerKind
from xlcli.config.runs import TrainConfig as TrainConfig
from xlcli.config.section import Section as Section
from xlcli.config.tree import Tree as Tree
from xlcli.config.tree import make as make
from xlcli.config.tree import meaning as meaning
from xlcli.config.tree import merge as merge
from xlcli.config.tree import parse_override as parse_override
from xlcli.config.tree import read_toml as read_toml
from xlcli.config.tree import to_json as to_json
from xlcli.config.tree import validate as validate

SCHEMA = 1
"""Version of `config.json`. A reader refuses a newer one."""
