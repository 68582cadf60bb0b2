import pytest

from zerofix.settings import SettingsError, bucket_copy, read, suggest, toggle

FIXES = ["copy_grads", "grad_accumulation"]


def test_nothing_set_means_everything_on():
    settings = read(FIXES, {"PATH": "/bin", "ZEROFIXES": "unrelated", "ZEROFIX_STRICT": ""})
    assert settings.wants("copy_grads")
    assert not settings.forces("copy_grads")
    assert not settings.strict
    assert settings.log == "summary"
    assert settings.given == {}


def test_a_fix_is_switched_by_its_name():
    settings = read(FIXES, {"ZEROFIX_COPY_GRADS": "0", "ZEROFIX_GRAD_ACCUMULATION": "force"})
    assert not settings.wants("copy_grads")
    assert settings.wants("grad_accumulation")
    assert settings.forces("grad_accumulation")


def test_zerofix_0_turns_everything_off():
    settings = read(FIXES, {"ZEROFIX": "0", "ZEROFIX_COPY_GRADS": "1"})
    assert not any(map(settings.wants, FIXES))


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("ZEROFIX_COPYGRADS", "0", "ZEROFIX_COPY_GRADS"),
        ("ZEROFIX_STRICTT", "1", "ZEROFIX_STRICT"),
        ("ZEROFIX_COPY_GRADS", "forced", "force"),
        ("ZEROFIX_LOG", "sumary", "summary"),
        ("ZEROFIX_BUCKET_COPY", "trition", "triton"),
        ("ZEROFIX_BUCKETCOPY", "torch", "ZEROFIX_BUCKET_COPY"),
        ("ZEROFIX", "off", "ZEROFIX='off'"),
        ("ZEROFIX_", "1", "ZEROFIX"),
    ],
)
def test_an_unknown_name_or_value_is_an_error_that_suggests_the_nearest(name, value, nearest):
    with pytest.raises(SettingsError, match=nearest):
        read(FIXES, {name: value})


@pytest.mark.parametrize("value", ["auto", "triton", "torch"])
def test_bucket_copy_is_a_setting(value):
    environ = {"ZEROFIX_BUCKET_COPY": value}
    assert read(FIXES, environ).given == environ
    assert bucket_copy(environ) == value


def test_bucket_copy_is_auto_unless_it_is_set():
    assert bucket_copy({}) == bucket_copy({"ZEROFIX_BUCKET_COPY": ""}) == "auto"


def test_a_bucket_copy_that_is_misspelt_after_the_import_is_an_error_as_well():
    with pytest.raises(SettingsError, match="Did you mean torch"):
        bucket_copy({"ZEROFIX_BUCKET_COPY": "torhc"})


def test_a_word_like_no_other_gets_the_whole_list():
    assert suggest("xyz", FIXES) == " Known: copy_grads, grad_accumulation."


def test_toggles_are_derived_from_names():
    assert [toggle(fix) for fix in FIXES] == ["ZEROFIX_COPY_GRADS", "ZEROFIX_GRAD_ACCUMULATION"]


@pytest.mark.parametrize(
    ("environ", "first_rank", "first_on_node"),
    [
        ({}, True, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True, True),
        ({"RANK": "", "LOCAL_RANK": ""}, True, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False, True),
        ({"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, False),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, False, False),
    ],
)
def test_ranks_are_read_from_the_launchers_variables(environ, first_rank, first_on_node):
    settings = read(FIXES, environ)
    assert (settings.first_rank, settings.first_on_node) == (first_rank, first_on_node)
