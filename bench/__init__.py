"""What holdfast costs, beside the limits of the machine and beside other libraries.

`python -m bench` measures, prints one table for each topic and keeps every figure under results/.
"""
