# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Records: NamedTuples whose fields lie side by side in memory, int64, or float64 where the class says float."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from octavo.kernels.cpu.lanes import INT64


def words_of(record: tuple[Any, ...]) -> list[int]:
    """Return a record's fields as the int64 words that `read` reads."""
    kinds = type(record).__annotations__.values()
    return [
        int(np.float64(field).view(np.int64)) if kind is float else field
        for field, kind in zip(record, kinds, strict=True)
    ]


@intrinsic
def read(typingctx, address, kind):
    """Return the record of a class that lies at an address."""
    record = kind.instance_class
    members = [types.float64 if record.__annotations__[name] is float else types.int64 for name in record._fields]
    result = types.BaseTuple.from_types(members, record)

    def generate(context, builder, signature, args):
        fields = []
        for index, member in enumerate(members):
            place = builder.add(args[0], INT64(8 * index))
            fields.append(builder.load(builder.inttoptr(place, context.get_value_type(member).as_pointer())))
        return context.make_tuple(builder, result, fields)

    return result(types.int64, kind), generate


@intrinsic(prefer_literal=True)
def replaced(typingctx, record, name, value):
    """Return a record with another value (int64) in the field of a constant name."""
    index = record.fields.index(name.literal_value)

    def generate(context, builder, signature, args):
        return builder.insert_value(args[0], args[2], index)

    return record(record, name, types.int64), generate
