"""Events that workflows yield: frozen values for commands to render and programs to read. Never imports torch.

Units: `seconds` is wall-clock time; `bits_per_byte` is nats / ln 2 / bytes of text; `nats` is a sum; byte offsets count
from the start of the text.
"""

from __future__ import annotations

from xlcli.events.progress import Notice as Notice
from xlcli.events.progress import Progress as Progress
from xlcli.events.progress import ProgressMeter as ProgressMeter
from xlcli.events.progress import StoppedEarlyError as StoppedEarlyError
from xlcli.events.progress import until as until
from xlcli.events.scores import ROUNDING_TOKENS as ROUNDING_TOKENS
from xlcli.events.scores import ContextBin as ContextBin
from xlcli.events.scores import LineScore as LineScore
from xlcli.events.scores import Score as Score
from xlcli.events.scores import Speed as Speed
from xlcli.events.scores import StreamStats as StreamStats
from xlcli.events.scores import TokenScore as TokenScore
from xlcli.events.text import Coded as Coded
from xlcli.events.text import Generated as Generated
from xlcli.events.text import GeneratedText as GeneratedText
from xlcli.events.text import TokenLogprob as TokenLogprob
from xlcli.events.training import Plan as Plan
from xlcli.events.training import Saved as Saved
from xlcli.events.training import ScoredText as ScoredText
from xlcli.events.training import Step as Step
from xlcli.events.training import Stopping as Stopping
from xlcli.events.training import Trained as Trained
from xlcli.events.training import Validation as Validation

Event = (
    Notice
    | Progress
    | Plan
    | Step
    | Validation
    | Saved
    | Stopping
    | Trained
    | TokenScore
    | Score
    | Speed
    | GeneratedText
    | Generated
    | LineScore
    | StreamStats
    | Coded
)
