"""Messages between a server and a client, as Flower's runtimes deliver them."""

from __future__ import annotations

import time

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from torch import Tensor, nn


def train_message(state: dict[str, Tensor], kind: str = "train", server_round: int = 1) -> Message:
    arrays = ArrayRecord(state)
    config = ConfigRecord({"server-round": server_round})
    return as_from_the_server(RecordDict({"arrays": arrays, "config": config}), kind)


def fit_message(model: nn.Module) -> Message:
    arrays = [value.numpy() for value in model.state_dict().values()]
    fit = FitIns(ndarrays_to_parameters(arrays), {})
    return as_from_the_server(fitins_to_recorddict(fit, True), "train")


def as_from_the_server(content: RecordDict, kind: str) -> Message:
    metadata = Metadata(
        run_id=1,
        message_id="1",
        src_node_id=0,
        dst_node_id=1,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=3600.0,
        message_type=kind,
    )
    return Message(content, metadata=metadata)


def context() -> Context:
    return Context(
        run_id=1, node_id=1, node_config={"partition-id": 3}, state=RecordDict(), run_config={}
    )


def weights_in(reply: Message) -> dict[str, Tensor]:
    assert not reply.has_error(), reply.error.reason
    (record,) = reply.content.array_records.values()
    return record.to_torch_state_dict()


def reason(reply: Message) -> str:
    assert reply.has_error()
    return str(reply.error.reason)
