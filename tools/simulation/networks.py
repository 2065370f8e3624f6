"""What an all-reduce costs on the simulated networks, by its size and the number of ranks.

Over TCP: the ring and the tree of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005): a ring of n ranks takes ``2 (n - 1)`` messages of
``1 / n`` of the bytes, recursive halving and doubling ``2 log2(n)`` messages and the same bytes.
A message takes 50 us; that is an assumption. 94 % of a link carry data.

With NCCL: its own model, ``src/graph/tuning.cc`` at commit 01afd20: for rings and trees, and each
of the protocols LL, LL128 and Simple, a base latency, a latency for each step, and which part of
the bandwidth is used; it runs the fastest. Left out are its corrections of the tree at medium
sizes and of long rings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from fusion_passes.profile.tables import CostTable, table_sizes

MESSAGE_US: Final = 50.0
TCP_SHARE: Final = 0.94

# Microseconds, by protocol: LL, LL128, Simple.
_BASE_US: Final = {"tree": (4.4, 4.4, 0.0), "ring": (3.6, 10.0, 8.4)}
_NVLINK_US: Final = {"tree": (0.52, 1.2, 28.0), "ring": (0.47, 1.9, 3.4)}
_NETWORK_US: Final = {"tree": (5.0, 8.5, 50.0), "ring": (2.7, 4.0, 9.6)}
# Part of the bandwidth that a protocol uses.
_SHARE: Final = {"tree": (0.9 / 3.8, 0.9 * 0.915, 0.9), "ring": (0.25, 0.92, 1.0)}


@dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
        name: for people.
        gbytes_per_s: of a rank's share of it, in each direction.
        is_tcp: whether ranks send over TCP; else with NCCL.
        ranks_per_host: ranks that NVLink joins.
    """

    name: str
    gbytes_per_s: float
    is_tcp: bool = False
    ranks_per_host: int = 1

    def seconds(self, num_bytes: int, ranks: int) -> float:
        """Seconds of one all-reduce among so many ranks."""
        if self.is_tcp:
            moved = 2 * (ranks - 1) / ranks * num_bytes / (self.gbytes_per_s * 1e9 * TCP_SHARE)
            messages = min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))
            return messages * MESSAGE_US * 1e-6 + moved
        return (
            min(
                self._nccl_us(num_bytes, ranks, algorithm, protocol)
                for algorithm in ("tree", "ring")
                for protocol in range(3)
            )
            / 1e6
        )

    def _nccl_us(self, num_bytes: int, ranks: int, algorithm: str, protocol: int) -> float:
        hosts = max(ranks // self.ranks_per_host, 1)
        on_host, between = _NVLINK_US[algorithm][protocol], _NETWORK_US[algorithm][protocol]
        if algorithm == "ring":
            steps = 2 * (hosts - 1)
            latency = (2 * (ranks - 1) - steps) * on_host + steps * between
            part = ranks / (2 * (ranks - 1))
        else:
            latency = 2 * ((ranks // hosts - 1) * on_host + math.log2(hosts) * between)
            part = 0.5
        speed = self.gbytes_per_s * _SHARE[algorithm][protocol] * part
        return _BASE_US[algorithm][protocol] + latency + num_bytes / (speed * 1e3)

    def measured(self, ranks: int, total_bytes: int) -> CostTable:
        """The table that a profile has: each size twice the one before."""
        return self._table(ranks, [*table_sizes(total_bytes), total_bytes])

    def exact(self, ranks: int, total_bytes: int) -> CostTable:
        """What collectives really take: a table so fine that its lines do not matter."""
        sizes, size = [], 1024.0
        while size < total_bytes:
            sizes.append(round(size))
            size *= 2**0.25
        return self._table(ranks, [*sizes, total_bytes])

    def _table(self, ranks: int, sizes: list[int]) -> CostTable:
        sizes = sorted(set(sizes))
        return CostTable.of(sizes, [self.seconds(size, ranks) for size in sizes])


NETWORKS: Final = (
    Network("1 Gbit Ethernet", 0.125, is_tcp=True),
    Network("10 Gbit Ethernet", 1.25, is_tcp=True),
    Network("100 Gbit RoCE", 12.5),
    Network("InfiniBand NDR", 50.0),
    # Eight cards on a host, each with a network card: the rings use all of them.
    Network("NVLink, 8 NDR a host", 235.0, ranks_per_host=8),
)
