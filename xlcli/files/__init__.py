"""Files: atomic and durable when written, bounded and checked when read. Imports no torch.

Reading raises `CheckpointError`; writing raises `ResourceError` or, for a path that cannot be a file, `ConfigError`.
"""

from xlcli.files.own import cache_folder as cache_folder
from xlcli.files.own import code_folder as code_folder
from xlcli.files.own import read_own as read_own
from xlcli.files.plain import append_line as append_line
from xlcli.files.plain import as_utf8 as as_utf8
from xlcli.files.plain import cannot_read as cannot_read
from xlcli.files.plain import cannot_write as cannot_write
from xlcli.files.plain import check_writable as check_writable
from xlcli.files.plain import copy_file as copy_file
from xlcli.files.plain import json_digest as json_digest
from xlcli.files.plain import make_folder as make_folder
from xlcli.files.plain import read_bounded as read_bounded
from xlcli.files.plain import read_json as read_json
from xlcli.files.plain import sha256 as sha256
from xlcli.files.plain import sync_folder as sync_folder
from xlcli.files.plain import write_atomic as write_atomic
from xlcli.files.tensors import digest as digest
from xlcli.files.tensors import read_header as read_header
from xlcli.files.tensors import read_tensors as read_tensors
from xlcli.files.tensors import with_prefix as with_prefix
from xlcli.files.tensors import write_tensors as write_tensors
