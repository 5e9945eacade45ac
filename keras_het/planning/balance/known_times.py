"""What is known of devices by their identities, for a training that continues with others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from keras_het.planning.times.time_model import LinearTimeModel, model_of_fields


@dataclasses.dataclass(frozen=True)
class KnownDevice:
    """A device that was measured: its product, its times, and its latest share if it is used."""

    product: str
    times: LinearTimeModel
    share: int | None = None


Known = Mapping[str, KnownDevice]
"""Devices by their identities."""


def to_json(known: Known) -> str:
    return json.dumps({identity: dataclasses.asdict(each) for identity, each in known.items()})


def from_json(text: str) -> dict[str, KnownDevice]:
    return {
        identity: KnownDevice(each["product"], model_of_fields(each["times"]), each["share"])
        for identity, each in json.loads(text or "{}").items()
    }


def recall(
    known: Known, devices: Sequence[tuple[str, str]]
) -> tuple[list[LinearTimeModel | None], list[int] | None]:
    """Return what is known of some devices, given as (identity, product) each.

    A device that is not known has the mean of those of its product, None if there are none. The
    second result is the shares, if the devices are those that had them.
    """
    times = [
        known[identity].times if identity in known else _mean(known, product)
        for identity, product in devices
    ]
    shares = {identity: each.share for identity, each in known.items() if each.share is not None}
    identities = [identity for identity, _ in devices]
    if sorted(shares) != sorted(identities):
        return times, None
    return times, [shares[identity] for identity in identities]


def _mean(known: Known, product: str) -> LinearTimeModel | None:
    alike = [each.times for each in known.values() if product and each.product == product]
    if not alike:
        return None
    return LinearTimeModel(
        sum(each.fixed_seconds for each in alike) / len(alike),
        sum(each.seconds_per_sample for each in alike) / len(alike),
    )
