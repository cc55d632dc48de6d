"""``freetrain doctor``: what is measured here and on the nodes, and what it means for trainings."""

from parsl_freetrain.cli.doctor.command import doctor

__all__ = ['doctor']
