"""Folders whose content is executed: made for this user alone, refused if another one can write them."""

import grp
import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from xlcli.errors import ConfigError
from xlcli.files import cache_folder, code_folder

OTHER = 12345
"""A user and a group that nobody has."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Folder of the cache, outside of the home folder."""
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path / "above" / "cache"))
    return tmp_path / "above" / "cache"


@pytest.fixture(autouse=True)
def _no_other_folder(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


@pytest.fixture
def own_group(monkeypatch):
    """Function that sets the name and the members of the group of the user; the user is `ann`."""
    user, gid = SimpleNamespace(pw_name="ann", pw_gid=os.getegid()), os.getegid()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {os.geteuid(): user}[uid])

    def change(name, *members):
        monkeypatch.setattr(
            grp, "getgrgid", lambda number: {gid: SimpleNamespace(gr_name=name, gr_mem=members)}[number]
        )

    return change


def kernels():
    return code_folder("kernels", "NUMBA_CACHE_DIR")


def refused(folder=kernels):
    with pytest.raises(ConfigError) as caught:
        folder()
    assert caught.value.exit_code == 2
    assert "XLCLI_CACHE" in caught.value.remedy
    return caught.value.message


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_new_folders_are_private(place, umask):
    before = os.umask(umask)
    try:
        assert kernels() == place / "kernels"
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (place.parent, place, place / "kernels")} == {0o700}
    assert kernels() == place / "kernels"


@pytest.mark.parametrize("name", [".", "cache", "cache/kernels"])
def test_others_can_write(place, name):
    kernels()
    folder = place.parent / name
    folder.chmod(0o777)
    assert str(folder) in refused()
    folder.chmod(0o1777)
    if folder == place.parent:
        assert kernels() == place / "kernels"
    else:
        refused()
    assert folder.stat().st_mode & 0o777 == 0o777, "it is not mended silently"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
@pytest.mark.parametrize("name", [".", "cache", "cache/kernels"])
def test_another_owner(place, name):
    kernels()
    folder = place.parent / name
    os.chown(folder, OTHER, -1)
    assert str(folder) in refused()
    folder.chmod(0o1777)
    refused()


def test_another_user_runs_the_program(place, monkeypatch):
    kernels()
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    if os.getuid():
        refused()
    else:
        assert kernels() == place / "kernels", "root may own it"


@pytest.mark.parametrize("name", [".", "cache", "cache/kernels"])
def test_a_group_of_the_user_alone_may_write(place, own_group, name):
    kernels()
    folder = place.parent / name
    folder.chmod(0o775)
    own_group("ann")
    assert kernels() == place / "kernels"
    own_group("ann", "ann")
    assert kernels() == place / "kernels"
    own_group("ann", "ann", "eve")
    assert str(folder) in refused()
    own_group("staff")
    refused()


def test_a_group_without_a_name_may_not_write(place, own_group, monkeypatch):
    kernels()
    place.chmod(0o770)
    own_group("ann")
    monkeypatch.setattr(grp, "getgrgid", lambda gid: {}[gid])
    refused()


def test_a_link_leads_to_the_folder_that_is_checked(place, tmp_path):
    hostile = tmp_path / "hostile"
    (hostile / "kernels").mkdir(parents=True)
    hostile.chmod(0o777)
    place.parent.mkdir()
    place.symlink_to(hostile)
    assert str(hostile) in refused()
    hostile.chmod(0o755)
    assert kernels() == hostile / "kernels"
    (hostile / "kernels").rmdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (hostile / "kernels").symlink_to(tmp_path / "open")
    assert str(tmp_path / "open") in refused()


def test_folders_above_the_home_folder_are_not_checked(tmp_path, monkeypatch):
    monkeypatch.delenv("XLCLI_CACHE")
    home = tmp_path / "shared" / "ann"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    home.parent.chmod(0o777)
    assert cache_folder() == home / ".cache" / "xlcli"


def spoil_home(home):
    home.chmod(0o777)


def spoil_owner(home):
    os.chown(home, OTHER, -1)


def spoil_cache(home):
    (home / ".cache").touch()


def spoil_name(home):
    home.rmdir()
    home.touch()


@pytest.mark.parametrize("spoil", [spoil_home, spoil_owner, spoil_cache, spoil_name])
def test_a_temporary_folder_takes_the_place_of_a_default_that_cannot_be_used(tmp_path, monkeypatch, spoil):
    if spoil is spoil_owner and os.geteuid():
        pytest.skip("only root gives folders away")
    home, said = tmp_path / "ann", []
    home.mkdir()
    spoil(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XLCLI_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which that standard does not allow
    folder = cache_folder(said.append)
    assert (cache_folder(said.append), kernels()) == (folder, folder / "kernels")
    assert (len(said), folder.stat().st_mode & 0o777, os.environ["XLCLI_CACHE"]) == (1, 0o700, str(folder))
    assert str(home) in said[0]
    assert not Path("relative").exists()


def test_the_temporary_folder_is_removed_at_the_end(tmp_path):
    (tmp_path / "home").touch()
    program = "from xlcli.files import cache_folder; (cache_folder() / 'x').touch(); print(cache_folder())"
    variables = {"HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, check=True, text=True)
    assert not Path(done.stdout.strip()).exists()


def test_a_user_without_a_name_and_home(place, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert kernels() == place / "kernels"


def test_a_variable_names_another_folder(place, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "other"))
    assert kernels() == tmp_path / "other"
    assert not place.exists()
    Path(tmp_path, "other").chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        kernels()
    assert "NUMBA_CACHE_DIR" in caught.value.remedy
