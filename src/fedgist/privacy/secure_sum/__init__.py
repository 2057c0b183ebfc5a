"""The exact sum of what many sites hold, from a server that sees no site's numbers.

Double masking with drop-out recovery (Bonawitz et al., CCS 2017, "Practical secure aggregation for
privacy-preserving machine learning"), on a graph of few neighbours for many sites (Bell et al.,
CCS 2020, "Secure single-server aggregation with (poly)logarithmic overhead").

1. ``keys``: each site signs two fresh X25519 keys and a commitment to a self-mask's seed.
2. ``shares``: it deals Shamir shares of its mask key and its seed to its neighbours, encrypted.
3. ``upload``: it sends x + (self-mask) ± (a mask shared with each neighbour), modulo 2^w. The
   width w comes from public bounds, so the sum of all sites is exact.
4. ``confirm``: it signs the one list of survivors, those whose upload arrived.
5. ``unmask``: having seen ``threshold`` signatures of its neighbourhood over that list, it gives
   its own seed, and of each neighbour the seed's share (a survivor) or the mask key's (a lost one).

**Who learns what.** The server learns the sum over the survivors, and who fell out when. A site
learns its neighbours' keys and who survived. Everything else is under ChaCha20 masks that only both
secrets of a site open. A server that follows the rules learns no more while fewer than
``threshold`` of any neighbourhood help it and the honest survivors stay connected
(`graph.choose_graph`). One that breaks the rules (invents sites, shows two lists, replays,
calls a late site lost) meets signatures under rostered keys, a list that no neighbourhood confirms
twice, and members that answer a stage once; it learns no more while at most `Terms.colluders` of
any neighbourhood help it. The second mask is for the late site, whose mask key is then known and
whose seed is not. ``quorum`` keeps a sum from holding fewer noise shares than its claim needs.

**Where it stops.** With a ``degree``, each member makes sure of one list in its own neighbourhood
only: a server that breaks the rules can show distant parts of the circle different lists and so sum
fewer sites than either holds, each still together with its nearest survivors. Against such a
server, count on a quorum's noise only without a degree. The circle's order follows from the
context: who writes the task could try contexts until chosen sites are surrounded. A member can
upload any number of the ring and, by wrong parcels or masks, spoil the sum (which is then refused,
not wrong unnoticed). Two sums over almost the same sites differ by one site: a context serves one
sum, and the rest is for the ledger and the noise.
"""

from __future__ import annotations

from fedgist.privacy.secure_sum.collector import Collector
from fedgist.privacy.secure_sum.member import Member
from fedgist.privacy.secure_sum.terms import STAGES, Block, Terms

__all__ = ["STAGES", "Block", "Collector", "Member", "Terms"]
