"""What users import from ``parsl_freetrain``, and how settings are refused, shown and read."""

import inspect
import pkgutil
import sys
from typing import Any

import pytest

import parsl_freetrain
import parsl_freetrain as ft
from tests.support.programs import run_to_end


def test_import_is_lazy() -> None:
    code = (
        'import sys, parsl_freetrain; dir(parsl_freetrain);'
        'print([m for m in ("parsl", "torch", "msgspec") if m in sys.modules]);'
        'import parsl_freetrain.testing;'  # which every rank with a fault does
        'print([m for m in ("parsl", "torch") if m in sys.modules]);'
        # Nor does a training need the libraries of replays.
        'import parsl_freetrain.executor, parsl_freetrain.cli.status, parsl_freetrain.cli.run;'
        'from parsl_freetrain import freetrain_app, LocalSite, FragmentContext;'
        'print([m for m in ("pandas", "pyarrow", "matplotlib", "joblib") if m in sys.modules])'
    )
    found = run_to_end([sys.executable, '-c', code], check=True)
    assert found.stdout.split() == ['[]'] * 3


def test_all_names_are_there() -> None:
    assert set(parsl_freetrain.__all__) == set(parsl_freetrain._MODULE_OF)
    for name in parsl_freetrain.__all__:
        assert getattr(parsl_freetrain, name).__name__ == name
        assert name in dir(parsl_freetrain)
    with pytest.raises(AttributeError, match='no attribute .freetrain_ap.'):
        _ = parsl_freetrain.freetrain_ap


@pytest.mark.parametrize('called', [ft.FreeTrainExecutor.__init__, parsl_freetrain.freetrain_app])
def test_few_parameters_at_the_top(called: Any) -> None:
    assert len([p for p in inspect.signature(called).parameters if p != 'self']) <= 12


def executor(**settings: Any) -> ft.FreeTrainExecutor:
    return ft.FreeTrainExecutor(
        provider=ft.BackfillProvider(site=ft.LocalSite(nodes=1)), **settings
    )


def test_arguments_are_attributes() -> None:
    policy, timeouts = ft.Policy(caps={'user anna': 3}, retries=2), ft.Timeouts(hang_s=40.0)
    made = executor(policy=policy, timeouts=timeouts, htex=ft.HtexOptions(encrypted=False))
    assert (made.policy, made.timeouts) == (policy, timeouts)
    assert made.encrypted is False
    assert made.heartbeat_threshold == 40
    for name in inspect.signature(ft.FreeTrainExecutor.__init__).parameters:
        assert name == 'self' or hasattr(made, name)


def test_repr_of_an_executor_makes_an_equal_one() -> None:
    made = executor(
        policy=ft.Policy(metric='speedup', keep_free=1), htex=ft.HtexOptions(poll_period=50)
    )
    names = {**{name: getattr(parsl_freetrain, name) for name in parsl_freetrain.__all__}}
    again = eval(repr(made), names)
    assert repr(again) == repr(made)
    assert (again.policy, again.htex, again.timeouts) == (made.policy, made.htex, made.timeouts)


def untyped(group: Any) -> Any:
    """For what type checkers refuse, too."""
    return group


def test_what_cannot_be_used_is_a_sentence() -> None:
    for make, said in (
        (lambda: untyped(ft.Timeouts)(hang='1'), "Timeouts has no argument 'hang'; say hang_s."),
        (lambda: untyped(ft.Timeouts)(hang_s='1'), "Timeouts: hang_s is '1'; it must be a number."),
        (
            lambda: untyped(ft.Timeouts)(step_s=0.0),
            'step_s is 0.0; it must be a number of seconds above 0.',
        ),
        (
            lambda: untyped(ft.Policy)(caps={'user a': 1.5}),
            r"Policy: caps\['user a'\] is 1.5; it must be a whole number.",
        ),
        (
            lambda: untyped(ft.HtexOptions)(encrypted='yes'),
            "encrypted is 'yes'; it must be True or False.",
        ),
        (lambda: executor(retries=1), r"no argument 'retries'; say policy=Policy\(retries=...\)."),
        (lambda: executor(time_outs=ft.Timeouts()), "no argument 'time_outs'; say timeouts."),
        (lambda: executor(policy={'retries': 1}), r'policy is .*; it must be a Policy'),
    ):
        with pytest.raises(ft.BadInput, match=said) as caught:
            make()
        assert str(caught.value).count('\n') == 0
        assert str(caught.value).endswith('.')


def test_modules_keep_the_names_by_which_scripts_outside_import_from_them() -> None:
    for place in (
        'core.model.errors:BadInput',
        'executor.fragment.fragment_state:RunningFragment',
        'executor.fragment.watchdog',
        'executor.settings:Timeouts',
        'replay.read:read_trace',
        'sites.batch.demand:needs',
        'sites.idle_schedule:Schedule',
        'sites.slurm.site:SlurmSite',
        'testing:with_faults',
        'training.checkpoint.block_digests:digest',
        'training.checkpoint.folder_claim:claim',
        'training.checkpoint.manifest:Damaged',
        'training.checkpoint.store:PosixCheckpointStore',
        'training.spec.retention:Retention',
    ):
        assert pkgutil.resolve_name(f'parsl_freetrain.{place}')
