"""Assumptions of a guarantee that nobody checked, by the keys that plans and ledgers keep."""

from __future__ import annotations

from typing import Literal

Unchecked = Literal["loss", "model", "seed", "ledger", "records", "public data", "collate"]
NOT_CHECKED: dict[Unchecked, str] = {
    "loss": 'loss="unchecked": nobody tried whether the loss keeps the records apart, as epsilon '
    "assumes",
    "model": "check=False: nobody tried in the loop whether model and loss keep the records apart, "
    "as epsilon assumes",
    "seed": "the noise comes from a seed: whoever knows it can subtract the noise",
    "ledger": "no ledger: other runs on the same records are not part of this epsilon, nor are "
    "steps lost in a crash",
    "records": "records= was not given: the number of records is that of the data set, and is "
    "treated as public",
    "collate": "collate_fn draws random numbers: nobody could try whether a row, or the padding of "
    "a batch, lets one record influence another",
    "public data": "only a sample of the public records was compared with the private ones",
}
