"""Sphinx configuration; build with ``make docs``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parsl_freetrain import __version__

project = 'parsl-freetrain'
author = 'the parsl-freetrain contributors'
copyright = author
version = release = __version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
myst_enable_extensions = ['colon_fence', 'deflist']
myst_heading_anchors = 3
exclude_patterns = ['_build', 'examples', 'evidence/versus.md']

autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_default_options = {'members': True, 'show-inheritance': True}
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
# A name in a list of attributes is no reference; many classes have an attribute of that name.
suppress_warnings = ['ref.python']

html_theme = 'furo'
html_title = f'parsl-freetrain {release}'
html_static_path = ['_static']
html_css_files = ['side-by-side.css']
html_show_sourcelink = False


def draw_zero_delay(app: Any, error: Exception | None) -> None:
    """The picture of docs/evidence/neighbours.md, from what was measured; it needs no cluster."""
    if error is None and app.builder.format == 'html':
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from zero_delay import draw

        draw(
            json.loads(Path(__file__).with_name('zero-delay.json').read_text()),
            Path(app.outdir) / '_static' / 'zero-delay.png',
        )


def draw_workloads(app: Any, error: Exception | None) -> None:
    """The pictures of docs/workloads, from what a run of each has found."""
    if error is None and app.builder.format == 'html':
        from workflows import chimera_gpt, cosmoflow, ffn, unet3d

        for workflow, name in (
            (cosmoflow, 'cosmoflow'),
            (unet3d, 'unet3d'),
            (chimera_gpt, 'chimera_gpt'),
            (ffn, 'ffn'),
        ):
            workflow.draw(
                json.loads(Path(__file__).with_name(f'{name}.json').read_text()),
                Path(app.outdir) / '_static' / f'{name}.png',
            )


def draw_pipelines(app: Any, error: Exception | None) -> None:
    """The picture of schedules in docs/chimera.md."""
    if error is None and app.builder.format == 'html':
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from pipeline_schedules import draw

        draw(Path(app.outdir) / '_static' / 'pipeline-schedules.png')


def draw_versus(app: Any, error: Exception | None) -> None:
    """The picture of docs/evidence/versus.md, if the comparison has been measured."""
    measured = Path(__file__).with_name('versus.json')
    if error is None and app.builder.format == 'html' and measured.exists():
        from tests.benchmarks.versus.tables import columns_of, picture

        picture(
            columns_of(json.loads(measured.read_text())),
            Path(app.outdir) / '_static' / 'versus.png',
        )


def setup(app: Any) -> None:
    app.connect('build-finished', draw_pipelines)
    app.connect('build-finished', draw_zero_delay)
    app.connect('build-finished', draw_workloads)
    app.connect('build-finished', draw_versus)
