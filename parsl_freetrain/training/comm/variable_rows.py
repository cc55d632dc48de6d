"""Exchange of bytes whose number differs between ranks."""

from __future__ import annotations

import torch

from parsl_freetrain.training.comm.peers import Peers

_HEAD = 8


def gather_bytes(peers: Peers, own: bytes) -> list[bytes]:
    """What each rank gave, in order of rank. All ranks call this."""
    if peers.world_size == 1:
        return [own]
    (longest,) = peers.all_reduce_max((len(own),))()
    if not longest:
        return [b''] * peers.world_size
    data = len(own).to_bytes(_HEAD, 'little') + own
    row = torch.zeros(_HEAD + longest, dtype=torch.uint8, device='cpu')
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [bytes(other.numpy()) for other in peers.all_gather(row)]
    return [said[_HEAD : _HEAD + int.from_bytes(said[:_HEAD], 'little')] for said in rows]
