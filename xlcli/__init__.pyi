from xlcli.api import Model as Model
from xlcli.api import copy_model as copy_model
from xlcli.api import evaluate as evaluate
from xlcli.api import generate as generate
from xlcli.api import generate_prompts as generate_prompts
from xlcli.api import load as load
from xlcli.api import resume as resume
from xlcli.api import stream as stream
from xlcli.api import train as train
from xlcli.api.runs import resume_events as resume_events
from xlcli.api.runs import train_events as train_events
from xlcli.api.values import TextScore as TextScore
from xlcli.api.values import TextState as TextState
from xlcli.config import read_toml as read_toml
from xlcli.errors import BusyError as BusyError
from xlcli.errors import CheckpointError as CheckpointError
from xlcli.errors import ConfigError as ConfigError
from xlcli.errors import DataError as DataError
from xlcli.errors import DivergedError as DivergedError
from xlcli.errors import ResourceError as ResourceError
from xlcli.errors import StateError as StateError
from xlcli.errors import XLError as XLError
from xlcli.presets import list_presets as list_presets
from xlcli.text.documents import Document as Document

__version__: str
