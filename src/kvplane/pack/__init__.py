"""Sessions outside the store: content-addressed, verified on the way in, exact to the bit."""

from kvplane.pack.chain import Aux, Chain
from kvplane.pack.documents import Cut, SavedSession, State
from kvplane.pack.fingerprint import Fingerprint, weights_of
from kvplane.pack.match import Match
from kvplane.pack.policy import Policy, crossed, wished_cuts
from kvplane.pack.prefix import PrefixCache
from kvplane.pack.reader import Loaded
from kvplane.pack.root import open_root
from kvplane.pack.sessions import (
    check_session_name,
    load,
    load_session,
    read_session,
    remove_session,
    save,
    save_session,
    session_names,
)
from kvplane.pack.writer import Codec, Written

__all__ = [
    "Aux",
    "Chain",
    "Codec",
    "Cut",
    "Fingerprint",
    "Loaded",
    "Match",
    "Policy",
    "PrefixCache",
    "SavedSession",
    "State",
    "Written",
    "check_session_name",
    "crossed",
    "load",
    "load_session",
    "open_root",
    "read_session",
    "remove_session",
    "save",
    "save_session",
    "session_names",
    "weights_of",
    "wished_cuts",
]
