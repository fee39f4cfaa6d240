import subprocess
import sys
import types

import pytest

from gpclml._utils.environment import shows_progress


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_shown_on_terminals_and_in_notebooks(monkeypatch, terminal):
    stream = types.SimpleNamespace(isatty=lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert shows_progress(None) == terminal
    assert shows_progress(True)
    assert not shows_progress(False)
    for shell in (None, types.SimpleNamespace(), types.SimpleNamespace(kernel=object())):
        ipython = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert shows_progress(None) == (terminal or hasattr(shell, "kernel"))


@pytest.mark.slow
def test_bars_are_those_of_notebooks_there_and_need_no_ipywidgets():
    """A kernel of Jupyter without ipywidgets: tqdm warns at import, and the bar is text."""
    code = (
        "import sys, types, warnings\n"
        "from gpclml._utils.environment import progress_bar\n"
        "warnings.simplefilter('error')\n"
        "sys.modules['ipykernel.zmqshell'] = types.ModuleType('zmqshell')\n"
        "sys.modules['IPython'] = types.ModuleType('IPython')\n"
        "sys.modules['IPython'].get_ipython = lambda: type('ZMQInteractiveShell', (), {})()\n"
        "sys.modules['ipywidgets'] = None\n"
        "assert list(progress_bar(range(3), progress=True, desc='fit')) == [0, 1, 2]\n"
        "import tqdm.auto\n"
        "assert type(progress_bar(progress=False)) is tqdm.auto.tqdm\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fit: 100%" in done.stderr
