"""The papers' own numbers, to stand beside ours.

Rank merge (WACV): Tables 1 and A2, AUC_mAP, AUC_CMC and Gain in percent, pictures brought to 224 x 224. Their 32 x 32 kin is
another experiment: Gains can be compared, absolute values cannot. HBCT (ICML 2025): Table 1, CIFAR-100, shares of 1.
"""

from __future__ import annotations

from typing import TypeAlias

#: AUC_mAP, AUC_CMC and Gain in percent.
Areas: TypeAlias = tuple[float, float, float]
#: CMC@1 self, cross, P_up, P_com, then the same of mAP; None for a model that has no cross.
Compatibility: TypeAlias = tuple[float | None, ...]

AREAS: dict[str, dict[str, Areas]] = {
    "cifar100-extended-class": {
        "old": (21.6, 34.3, 0),
        "new": (47.4, 62.6, 100),
        "naive": (30.8, 49.1, 36),
        "bct": (26.4, 43.5, 19),
        "fct": (27.1, 49.4, 21),
        "fct-side": (37.0, 53.9, 60),
        "bict": (29.0, 48.3, 29),
        "rm": (41.4, 60.7, 78),
    },
    "cifar100-extended-class-wider": {
        "old": (21.6, 34.3, 0),
        "new": (50.0, 67.5, 100),
        "naive": (33.8, 48.9, 43),
        "bct": (27.1, 45.9, 19),
        "fct": (28.9, 54.2, 26),
        "fct-side": (41.5, 64.2, 70),
        "bict": (29.9, 50.7, 29),
        "ract": (36.9, 60.9, 54),
        "rm": (45.6, 64.5, 85),
    },
    "market1501-extended-class": {
        "old": (62.7, 82.7, 0),
        "new": (77.3, 90.9, 100),
        "naive": (69.2, 87.0, 45),
        "bct": (66.6, 84.3, 27),
        "fct": (66.4, 84.2, 25),
        "fct-side": (66.4, 84.4, 25),
        "bict": (65.0, 82.4, 16),
        "rm": (70.7, 87.6, 55),
    },
}

COMPATIBILITY: dict[str, dict[str, Compatibility]] = {
    "cifar100-ext-data": {
        "old": (0.572, None, None, None, 0.472, None, None, None),
        "new": (0.716, 0.019, 0.0, -3.846, 0.654, 0.072, 0.0, -2.195),
        "l2": (0.680, 0.645, -0.049, 0.510, 0.627, 0.537, -0.042, 0.355),
        "bct": (0.706, 0.701, -0.014, 0.900, 0.642, 0.546, -0.018, 0.406),
        "ract": (0.718, 0.671, 0.003, 0.693, 0.653, 0.544, -0.003, 0.396),
        "advbct": (0.698, 0.681, -0.025, 0.760, 0.638, 0.543, -0.025, 0.389),
        "hoc": (0.720, 0.670, 0.006, 0.685, 0.656, 0.544, 0.003, 0.396),
        "old-hyperbolic": (0.576, None, None, None, 0.455, None, None, None),
        "new-hyperbolic": (0.722, 0.011, 0.0, -3.851, 0.651, 0.012, 0.0, -2.263),
        "hbct-no-entail": (0.722, 0.700, -0.001, 0.847, 0.653, 0.564, -0.002, 0.547),
        "hbct": (0.721, 0.716, -0.002, 0.956, 0.656, 0.567, 0.001, 0.560),
    },
    "cifar100-ext-class": {
        "old": (0.376, None, None, None, 0.310, None, None, None),
        "new": (0.716, 0.019, 0.0, -1.052, 0.654, 0.019, 0.0, -0.845),
        "l2": (0.712, 0.478, -0.005, 0.302, 0.653, 0.342, -0.002, 0.093),
        "bct": (0.695, 0.447, -0.029, 0.210, 0.624, 0.328, -0.046, 0.054),
        "ract": (0.715, 0.498, -0.001, 0.360, 0.649, 0.348, -0.007, 0.110),
        "advbct": (0.708, 0.459, -0.011, 0.244, 0.642, 0.337, -0.018, 0.080),
        "hoc": (0.713, 0.490, -0.003, 0.336, 0.651, 0.346, -0.005, 0.106),
        "old-hyperbolic": (0.425, None, None, None, 0.330, None, None, None),
        "new-hyperbolic": (0.722, 0.002, 0.0, -1.428, 0.656, 0.012, 0.0, -0.979),
        "hbct-no-entail": (0.726, 0.555, 0.006, 0.435, 0.655, 0.388, -0.001, 0.176),
        "hbct": (0.722, 0.572, -0.001, 0.495, 0.655, 0.398, -0.001, 0.209),
    },
    "tinyimagenet-ext-class": {
        "old": (0.273, None, None, None, 0.211, None, None, None),
        "new": (0.540, 0.007, 0.0, -0.991, 0.420, 0.008, 0.0, -0.971),
        "l2": (0.536, 0.307, -0.008, 0.127, 0.418, 0.226, -0.005, 0.071),
        "bct": (0.514, 0.292, -0.049, 0.073, 0.401, 0.217, -0.046, 0.029),
        "ract": (0.534, 0.334, -0.012, 0.229, 0.414, 0.231, -0.016, 0.094),
        "advbct": (0.524, 0.254, -0.030, -0.070, 0.404, 0.213, -0.039, 0.007),
        "hoc": (0.537, 0.342, -0.005, 0.258, 0.416, 0.233, -0.011, 0.102),
        "old-hyperbolic": (0.299, None, None, None, 0.212, None, None, None),
        "new-hyperbolic": (0.549, 0.006, 0.0, -1.178, 0.410, 0.007, 0.0, -1.038),
        "hbct-no-entail": (0.547, 0.344, -0.003, 0.177, 0.404, 0.236, -0.014, 0.120),
        "hbct": (0.553, 0.373, 0.009, 0.295, 0.408, 0.246, -0.005, 0.169),
    },
}
