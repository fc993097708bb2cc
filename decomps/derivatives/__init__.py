"""Derivative formulas, one file a family, under their FunctionsManual names. Importing the package
registers them.
"""

import importlib
import pkgutil

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
