"""Every Python process of the tests runs this as it starts."""

import os

from tests.support.unzipped import prefer_installed

prefer_installed()
if "PENSTOCK_TEST_WARM" in os.environ:
    from tests.support.warm import hand_over

    hand_over()
