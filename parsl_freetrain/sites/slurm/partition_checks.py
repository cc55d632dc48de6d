"""Compares a site config with what its partition allows, before anything is submitted."""

from __future__ import annotations

from collections.abc import Mapping

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.records import Partition
from parsl_freetrain.sites.slurm.options import SlurmOptions


def partition_for(options: SlurmOptions, partitions: Mapping[str, Partition]) -> Partition:
    """The partition of the options.

    Raises
    ------
    BadInput
        There is none of this name, it does not take this account or QOS, or it does not suit the
        mode.
    """
    partition = partitions.get(options.partition)
    if partition is None:
        raise BadInput(
            f'Slurm has no partition {options.partition!r}; it has '
            f'{", ".join(sorted(partitions)) or "none that you may see"}.'
        )
    where = f'The partition {partition.name!r}'
    if options.account and partition.accounts and options.account not in partition.accounts:
        raise BadInput(
            f'{where} does not take the account {options.account!r}; it takes '
            f'{", ".join(partition.accounts)}.'
        )
    if options.account and options.account in partition.denied_accounts:
        raise BadInput(
            f'{where} does not take the account {options.account!r}; name another '
            'account or partition.'
        )
    if options.qos and partition.qos and options.qos not in partition.qos:
        raise BadInput(
            f'{where} does not take the QOS {options.qos!r}; it takes {", ".join(partition.qos)}.'
        )
    if partition.longest_s is not None and partition.longest_s < 60:
        raise BadInput(
            f'{where} has a time limit of {partition.longest_s:g} s; a block needs at '
            'least one minute.'
        )
    if (
        options.longest_s is not None
        and partition.longest_s is not None
        and options.longest_s > partition.longest_s
    ):
        raise BadInput(
            f'{where} has a time limit of {partition.longest_s:g} s, and longest_s is '
            f'{options.longest_s:g}; '
            f'it must not be more.'
        )
    if options.preemptible and partition.preempt_mode == 'OFF' and options.qos is None:
        raise BadInput(
            f'{where} is not preemptible (its PreemptMode is OFF), and mode is '
            "'preemptible'; name a partition or a QOS "
            f"that may be preempted, or use mode 'backfill'."
        )
    return partition
