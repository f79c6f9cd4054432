"""What core/native/ring.c offers: the classes of inline.py, in C."""

from hardpoint.rpc.shared_memory.inline import InlineReader as InlineReader
from hardpoint.rpc.shared_memory.inline import InlineWriter as InlineWriter
from hardpoint.rpc.shared_memory.inline import ReplyRings as ReplyRings
