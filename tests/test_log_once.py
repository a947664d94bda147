"""Messages that are logged once."""

import logging

from jaxserve.api.log_once import MAX_REMEMBERED, LogOnce


def test_a_message_is_logged_again_once_it_was_forgotten(caplog):
    notes = LogOnce(logging.getLogger("notes"))
    for _ in range(3):
        notes.warning("the field %a", "seed")
    for number in range(MAX_REMEMBERED):
        notes.warning("the field %a", number)
    assert caplog.text.count("the field 'seed' (not logged again)") == 1
    notes.warning("the field %a", "seed")
    assert caplog.text.count("the field 'seed'") == 2
