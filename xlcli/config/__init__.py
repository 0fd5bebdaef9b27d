"""Typed, immutable configuration, read from TOML tables and dotted overrides. Never imports torch.

A value of None is filled in when a run starts; `config.json` of a model stores the result. Illegal values and
combinations raise `ConfigError` with the legal choices.
"""

from xlcli.config.attention import ATTENTIONS as ATTENTIONS
from xlcli.config.attention import AttentionConfig as AttentionConfig
from xlcli.config.attention import MemoryDtype as MemoryDtype
from xlcli.config.attention import RandomAttentionConfig as RandomAttentionConfig
from xlcli.config.base import BaseConfig as BaseConfig
from xlcli.config.base import Option as Option
from xlcli.config.base import WeightEncoding as WeightEncoding
from xlcli.config.inference import BenchConfig as BenchConfig
from xlcli.config.inference import EvalConfig as EvalConfig
from xlcli.config.inference import GenerateConfig as GenerateConfig
from xlcli.config.inference import InferenceConfig as InferenceConfig
from xlcli.config.inference import OnlineConfig as OnlineConfig
from xlcli.config.inference import Sampling as Sampling
from xlcli.config.inference import StreamConfig as StreamConfig
from xlcli.config.model import ModelConfig as ModelConfig
from xlcli.config.model import ReversibleStackConfig as ReversibleStackConfig
from xlcli.config.model import UniversalStackConfig as UniversalStackConfig
from xlcli.config.position import POSITIONS as POSITIONS
from xlcli.config.tree import Tree as Tree
from xlcli.config.tree import change as change
from xlcli.config.tree import differences as differences
from xlcli.config.tree import make as make
from xlcli.config.tree import merge as merge
from xlcli.config.tree import parse_override as parse_override
from xlcli.config.tree import read_toml as read_toml
from xlcli.config.tree import table as table
from xlcli.config.tree import validate as validate
from xlcli.config.workflows import Config as Config
from xlcli.config.workflows import RuntimeConfig as RuntimeConfig
from xlcli.config.workflows import TextConfig as TextConfig
from xlcli.config.workflows import TrainConfig as TrainConfig
