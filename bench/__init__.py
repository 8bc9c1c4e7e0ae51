"""What holdfast costs, compared with the limits of the machine and with other libraries.

`python -m bench` measures, prints one table for each topic and keeps every figure under results/.
"""
