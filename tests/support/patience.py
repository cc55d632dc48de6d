"""Imported by templates: ranks and fork servers wait for each other longer than usual."""

from parsl_freetrain.training.checkpoint import transport_memory
from parsl_freetrain.training.process import standby_slots
from tests.support.waiting import LIMIT_S

vars(transport_memory)['_ANSWER_S'] = LIMIT_S / 10
vars(standby_slots)['KEPT_S'] = LIMIT_S
