"""The README as a package index shows it; all other metadata is in pyproject.toml.

Links to files of the repository lead nowhere there: such a file is named instead, plots
are left out.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
README = re.sub(r"!\[[^]]*\]\((?!\w+:)[^)]+\)\n+", "", README)

setup(
    long_description=re.sub(r"\[([^]]+)\]\((?!\w+:|#)([^)]+)\)", r"\1 (`\2`)", README),
    long_description_content_type="text/markdown",
)
