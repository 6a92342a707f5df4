"""Losses, one family a file. Tests check each against a slow loop written from its formula.

`rank_merge` trains ψ and ρ, and its names are here, too. `fct` trains h, which lifts an old gallery. The others train a new model
φ_new whose vectors can be compared with an old model's: `l2`, `bct`, `ract`, `hoc`, `advbct`, `hbct`. `compatible.train` takes
them by name. f_n and f_o are the embeddings of the same batch by the new model and by the old one, which stays frozen. A hat
means L2-normalised.
"""

from rmvdb.learning.losses.rank_merge import cl_m, cl_s, distances, hardest_half, mcl, paired, rqt

__all__ = ["cl_m", "cl_s", "distances", "hardest_half", "mcl", "paired", "rqt"]
