"""Graphs of the ordered device, with the vocabulary of the real ones.

A capture notes work and leaves no trace of it: what it would write is as before at its end, and
what it makes holds rubbish until a replay. Waiting for the device, or copying to or from the host,
ends a capture with an error: on whatever thread, unless the capture is of its own only. Graphs of
one pool share memory: a replay destroys the results of the others. A graph holds memory of the
device beside the allocator's.
"""

from __future__ import annotations

import threading

import torch
from ordered_memory import MEMORY, RUBBISH

OWN_BYTES = 1 << 16
"""What one graph takes beside its tensors."""


class CaptureError(RuntimeError):
    """Something that is not allowed while a stream is captured."""


class GraphPool:
    """Memory that graphs share."""

    def __init__(self):
        self.last = None


class Graph:
    """Work in order."""

    device = None  # set by ordered_device

    def __init__(self):
        self.entries = []
        self.born = []
        self.before = []
        self.state = "empty"
        self.stream = None
        self.shared = None
        self.thread = None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        device = self.device
        if device.current is device.default:
            raise CaptureError("the default stream cannot be captured")
        self.shared = pool or GraphPool()
        self.stream = device.current
        self.thread = None if capture_error_mode == "global" else threading.get_ident()
        self.state = "capturing"
        device.capture = self

    def capture_end(self):
        self.device.capture = None
        for tensor, values in reversed(self.before):
            if tensor.shape == values.shape:  # else it was empty, to be resized
                tensor.copy_(values)
        self.before = []
        self.spoil()
        if self.state == "invalid":
            raise CaptureError("the capture was made invalid before")
        self.state = "captured"
        MEMORY.other += OWN_BYTES

    def __del__(self):
        if self.state == "captured":
            MEMORY.other -= OWN_BYTES

    def pool(self):
        return self.shared

    def spoil(self):
        """Leave rubbish in what the graph makes."""
        for tensor in self.born:
            tensor.contiguous().view(-1).view(torch.uint8).fill_(RUBBISH)

    # While capturing.

    def concerns_thread(self):
        """Whether what this thread asks of the device ends the capture."""
        return self.thread in (None, threading.get_ident())

    def refuse(self, what):
        """End the capture: the device cannot note this."""
        self.state = "invalid"
        raise CaptureError(f"{what} is not permitted while a stream is captured")

    def will_write(self, tensors):
        """Keep what a noted operation must not have written."""
        if self.device.current is not self.stream:
            self.refuse("work on another stream")
        self.before += [(each.inner, each.inner.clone()) for each in tensors]

    def note(self, replayed, reads, writes, made):
        """Note one operation: ``replayed`` does it again, into ``made``."""
        self.entries.append((replayed, tuple(reads), tuple(writes), tuple(made)))
        self.born += [each.inner for each in made]

    def replay(self):
        """Launch it on the current stream."""
        if self.state != "captured":
            raise CaptureError(f"a graph that is {self.state} cannot be replayed")
        if self.device.capture is not None:
            self.device.capture.refuse("a replay")
        last, self.shared.last = self.shared.last, self
        if last is not None and last is not self:
            last.spoil()
        stream = self.device.current
        for replayed, reads, writes, made in self.entries:
            number = stream.next()
            for tensor in reads:
                tensor.history.read(stream, number, "a replay")
            for tensor in (*writes, *made):
                tensor.history.write(stream, number, "a replay")
            replayed()
